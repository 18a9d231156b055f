# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The unit file: what systemd reads out of it is what was meant."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ansible_collections.volta.llm.plugins.module_utils.serving.unit import (
    STARTS,
    Unit,
    load_timeout,
    quote,
    quote_assignment,
    render,
)
from hypothesis import given
from hypothesis import strategies as st

CPU = Unit(
    name="llama-server",
    description="llama-server: demo on port 8080",
    user="llama-server",
    group="llama-server",
    argv=["/opt/llama.cpp/current/bin/llama-server", "--alias", "a name", "--port", "8080"],
    environment={"A": "1"},
    guard="/usr/local/lib/volta-llm/llama-server-guard",
    python="/usr/bin/python3",
    health_url="http://127.0.0.1:8080/health",
    port=8080,
    load_timeout=600,
)
CUDA = replace(CPU, cuda=True, gpus=4)


def settings(unit: Unit) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in render(unit).splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def unquoted(text: str) -> str:
    """How systemd reads one quoted or plain word of an Exec line (systemd.service(5), Command lines)."""
    if text.startswith('"'):
        text = text[1:-1].replace('\\"', '"').replace("\\\\", "\\")
    return text.replace("%%", "%").replace("$$", "$")


@given(st.text(st.characters(min_codepoint=32, exclude_characters="\x7f", exclude_categories=["Cs"]), min_size=1))
def test_any_word_survives(word: str) -> None:
    quoted = quote(word)
    assert unquoted(quoted) == word
    assert quoted.startswith('"') or not set(quoted) & set(" \t\"'\\;")


def test_an_empty_word_stays_a_word() -> None:
    assert quote("") == '""'


@pytest.mark.parametrize(
    ("value", "written"),
    [("a b", '"X=a b"'), ("100%", '"X=100%%"'), ('say "hi"\\', '"X=say \\"hi\\"\\\\"'), ("$HOME", '"X=$HOME"')],
)
def test_environment_values(value: str, written: str) -> None:
    assert quote_assignment("X", value) == written


def test_it_runs_as_its_own_user_and_is_active_when_ready() -> None:
    found = settings(CPU)
    assert (found["User"], found["Group"]) == (["llama-server"], ["llama-server"])
    assert found["ExecStart"] == ['/opt/llama.cpp/current/bin/llama-server --alias "a name" --port 8080']
    ready, reset = found["ExecStartPost"]
    assert ready.endswith("ready --url http://127.0.0.1:8080/health --port 8080 --pid $MAINPID")
    assert reset == "+-/usr/bin/systemctl reset-failed %n"
    assert found["TimeoutStartSec"] == ["600"]
    (ended,) = found["ExecStopPost"]
    assert ended == "+-/usr/bin/python3 -I /usr/local/lib/volta-llm/llama-server-guard why"
    assert found["NotifyAccess"] == ["all"]
    assert found["Restart"] == ["on-failure"]


def test_the_start_limit_can_be_reached() -> None:
    """Starts that each take their whole time must still fall into one interval (E20: thousands of restarts)."""
    found = settings(replace(CPU, load_timeout=3600))
    assert found["StartLimitBurst"] == [str(STARTS)]
    assert int(found["StartLimitIntervalSec"][0]) > STARTS * 3600


def test_a_gpu_server_sees_the_cards_and_nothing_else() -> None:
    """E18 NixOS/nixpkgs#331069: hardening that hides the GPU."""
    found = settings(CUDA)
    assert found["DevicePolicy"] == ["closed"]
    assert [value.split()[0] for value in found["DeviceAllow"]] == [
        "char-nvidia-frontend",
        "char-nvidia",
        "char-nvidia-uvm",
        "char-nvidia-caps",
    ]
    assert "PrivateDevices" not in found
    assert "MemoryDenyWriteExecute" not in found
    (before,) = found["ExecStartPre"]
    assert before.startswith("+/usr/bin/python3 -I ")
    assert before.endswith("devices --count 4 --timeout 60")


def test_a_cpu_server_sees_no_devices() -> None:
    found = settings(CPU)
    assert found["PrivateDevices"] == ["yes"]
    assert "ExecStartPre" not in found
    assert "DeviceAllow" not in found


@pytest.mark.parametrize(
    ("path", "home", "tmp"),
    [
        ("/srv/m.gguf", "yes", "yes"),
        ("/home/ai/m.gguf", "read-only", "yes"),
        ("/root/template.jinja", "read-only", "yes"),
        ("/tmp/m.gguf", "yes", "no"),
        ("/var/tmp/m.gguf", "yes", "no"),
        ("/homely/tmp/m.gguf", "yes", "yes"),
    ],
)
def test_what_the_server_reads_stays_readable(path: str, home: str, tmp: str) -> None:
    """F08 ollama/ollama#10672: ProtectHome hides models that lie there."""
    found = settings(replace(CPU, paths=["/srv/first.gguf", path]))
    assert (found["ProtectHome"], found["PrivateTmp"]) == ([home], [tmp])


def test_memory_is_locked_only_where_it_was_asked_for() -> None:
    assert "LimitMEMLOCK" not in settings(CPU)
    assert settings(replace(CPU, limit_memlock=True))["LimitMEMLOCK"] == ["infinity"]


@pytest.mark.parametrize(
    ("size", "seconds"), [(None, 600), (0, 120), (60_000_000, 120), (103_690_000_000 * 1073741824 // 10**9, 900)]
)
def test_time_to_load_grows_with_the_model(size: int | None, seconds: int) -> None:
    """E06 mostlygeek/llama-swap#92: 15 s for a large model."""
    assert load_timeout(size) == seconds


def test_keys_of_tls_stay_readable_to_root_alone() -> None:
    found = settings(replace(CPU, copies={"tls-key": "/etc/ssl/private/50%.key", "tls-certificate": "/etc/ssl/a.pem"}))
    assert (found["RuntimeDirectory"], found["RuntimeDirectoryMode"]) == (["llama-server"], ["0700"])
    copy = "+/usr/bin/install --owner=llama-server --group=llama-server --mode=0400"
    assert found["ExecStartPre"] == [
        f"{copy} /etc/ssl/a.pem /run/llama-server/tls-certificate",
        f"{copy} /etc/ssl/private/50%%.key /run/llama-server/tls-key",
    ]


def test_clients_are_filtered_by_systemd() -> None:
    found = settings(replace(CPU, admitted=["192.168.10.0/24", "fd00::/8"]))
    assert found["IPAddressDeny"] == ["any"]
    assert found["IPAddressAllow"] == ["localhost", "192.168.10.0/24", "fd00::/8"]
    # A loopback server has nobody to talk to; one that is open to all says nothing.
    assert settings(replace(CPU, admitted=[]))["IPAddressAllow"] == ["localhost"]
    assert "IPAddressDeny" not in settings(CPU)


def test_clients_are_filtered_by_nftables_from_before_the_start_to_the_end() -> None:
    found = settings(replace(CUDA, name="llama-server@b", ruleset="/etc/llama-server/llama-server@b.nft"))
    assert found["ExecStartPre"][0] == "+/usr/sbin/nft -f /etc/llama-server/llama-server@b.nft"
    assert found["ExecStopPost"][1:] == ["+-/usr/sbin/nft delete table inet volta_llm_llama_server_b"]
    assert "IPAddressDeny" not in found


def test_what_hangs_in_the_driver_is_given_up_in_time() -> None:
    """E24 NVIDIA/nvidia-docker#1553: a stop that never ends."""
    for found in (settings(CPU), settings(CUDA)):
        assert found["TimeoutStopSec"] == ["30"]


#: Settings that systemd got after 249, which Ubuntu 22.04 has, as far as one might want them here.
TOO_NEW = {"RestartSteps", "RestartMaxDelaySec", "RestartMode", "ImportCredential", "MemoryKSM", "LogFilterPatterns"}


def test_nothing_is_newer_than_the_oldest_systemd() -> None:
    everything = replace(CUDA, copies={"tls-key": "/a"}, admitted=["10.0.0.0/8"], ruleset="/b", limit_memlock=True)
    assert not TOO_NEW & settings(everything).keys()
