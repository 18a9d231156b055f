# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The drop-in says all that decides, whoever wrote the unit file; what all files of a unit say together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.ollama.unit import (
    DROPIN,
    MARK,
    Origin,
    Unit,
    base,
    drop_in,
    edited,
    effective,
    in_order,
    quote_path,
)
from ansible_collections.volta.llm.plugins.module_utils.serving.dropins import lines_of

CUDA = Unit(
    binary="/opt/ollama/current/bin/ollama",
    user="ollama",
    environment={"OLLAMA_HOST": "127.0.0.1:11434", "HOME": "/var/lib/ollama"},
    guard="/usr/local/lib/volta-llm/llama-server-guard",
    python="/usr/bin/python3",
    root_url="http://127.0.0.1:11434",
    port=11434,
    gpus=4,
    unset=["OLLAMA_ORIGINS"],
    writable=["/var/lib/ollama/models"],
)
VENDOR = """\
[Unit]
Description=Ollama Service
After=network-online.target

[Service]
ExecStart=/usr/local/bin/ollama serve
User=ollama
Group=ollama
Restart=always
RestartSec=3
Environment="PATH=/usr/local/sbin:/usr/bin"

[Install]
WantedBy=default.target
"""


def settings(unit: Unit) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in lines_of(drop_in(unit)):
        found.setdefault(line.key, []).append(line.value)
    return found


def test_it_waits_for_persistence_and_devices_and_is_active_when_it_answers() -> None:
    """F14 ollama/ollama#7669: on the CPU after a boot, without an error."""
    found = settings(CUDA)
    for key in ("After", "Wants"):
        assert "nvidia-persistenced.service" in found[key][0].split()
    empty, devices = found["ExecStartPre"]
    assert (empty, devices.endswith("llama-server-guard devices --count 4 --timeout 60")) == ("", True)
    _, ready, _ = found["ExecStartPost"]
    assert ready.endswith("ready --url http://127.0.0.1:11434/api/version --port 11434 --pid $MAINPID")
    assert int(found["TimeoutStartSec"][0]) > 60
    assert found["ExecStartPre"] != settings(replace(CUDA, gpus=None))["ExecStartPre"]
    assert settings(replace(CUDA, device_timeout=0))["ExecStartPre"] == [""]
    longer = settings(replace(CUDA, device_timeout=600))
    assert int(longer["TimeoutStartSec"][0]) - int(found["TimeoutStartSec"][0]) == 540
    assert settings(replace(CUDA, cuda=False))["ExecStartPre"] == [""]


def test_it_runs_the_pinned_program_whatever_the_unit_file_runs() -> None:
    found = settings(CUDA)
    assert found["ExecStart"] == ["", "/opt/ollama/current/bin/ollama serve"]
    assert (found["User"], found["Group"], found["EnvironmentFile"]) == (["ollama"], ["ollama"], [""])
    assert found["UnsetEnvironment"] == ["OLLAMA_ORIGINS"]
    assert found["Environment"] == ['"HOME=/var/lib/ollama"', '"OLLAMA_HOST=127.0.0.1:11434"']


@pytest.mark.parametrize(
    ("folder", "home"),
    [("/srv/ollama/models", "yes"), ("/home/ollama_models", "read-only"), ("/root/models", "read-only")],
)
def test_its_sandbox_leaves_it_the_models(folder: str, home: str) -> None:
    """F08 ollama/ollama#10672, #2701."""
    found = settings(replace(CUDA, writable=[folder]))
    assert (found["ProtectHome"], found["ReadWritePaths"]) == ([home], [folder])
    assert found["ProtectSystem"] == ["strict"]
    assert found["InaccessiblePaths"] == [""]


def test_a_link_is_followed_for_the_sandbox(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert settings(replace(CUDA, writable=[str(tmp_path / "link")]))["ReadWritePaths"] == [str(tmp_path / "real")]


def test_the_cards_are_left_to_it_and_nothing_else() -> None:
    found = settings(CUDA)
    assert found["DevicePolicy"] == ["closed"]
    assert "char-nvidia-uvm rw" in found["DeviceAllow"]
    assert "PrivateDevices" not in found
    assert settings(replace(CUDA, cuda=False))["PrivateDevices"] == ["yes"]
    # Its addresses are asked for by netlink.
    assert "AF_NETLINK" in found["RestrictAddressFamilies"][0]
    # A filter of systemd's would keep it from the registry.
    assert "IPAddressDeny" not in found


def test_rules_are_set_before_each_start_and_taken_away_after() -> None:
    found = settings(replace(CUDA, ruleset="/etc/ollama/ollama-1.nft"))
    assert found["ExecStartPre"][1] == "+/usr/sbin/nft -f /etc/ollama/ollama-1.nft"
    assert found["ExecStopPost"][-1] == "+-/usr/sbin/nft delete table inet volta_llm_ollama"
    assert len(settings(CUDA)["ExecStopPost"]) == 2


def test_the_other_engine_is_stopped_and_its_end_waited_for() -> None:
    found = settings(replace(CUDA, conflicts=["llama-server.service", "llama-server@b.service"]))
    assert found["Conflicts"] == ["llama-server.service llama-server@b.service"]
    assert found["After"][1] == found["Conflicts"][0]
    assert "Conflicts" not in settings(CUDA)


@pytest.mark.parametrize(
    ("path", "written"), [("/srv/a", "/srv/a"), ("/srv/a b", '"/srv/a b"'), ("/srv/100%", "/srv/100%%")]
)
def test_paths_in_lists(path: str, written: str) -> None:
    assert quote_path(path) == written


def test_a_unit_file_of_ours_says_next_to_nothing() -> None:
    assert base().startswith(MARK)
    assert {line.key for line in lines_of(base())} == {"Description", "ExecStart", "WantedBy"}
    assert edited(base()) == []


# --- what others wrote ------------------------------------------------------------------------------------------------


def test_the_vendor_s_unit_counts_as_unedited() -> None:
    assert edited(VENDOR) == []
    assert edited(VENDOR.replace("/usr/local/bin", "/opt/x").replace("default.target", "multi-user.target")) == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda text: text.replace("RestartSec=3\n", 'RestartSec=3\nEnvironment="OLLAMA_HOST=0.0.0.0"\n'), 11),
        (lambda text: text.replace("User=ollama", "User=root"), 7),
        (lambda text: text.replace("RestartSec=3", "RestartSec=30"), 10),
    ],
)
def test_lines_that_somebody_wrote_into_it(change: Callable[[str], str], line: int) -> None:
    """F10 ollama/ollama#2268: the next run of the vendor's script takes them away."""
    assert [found.number for found in edited(change(VENDOR))] == [line]


def test_all_files_together() -> None:
    ours = drop_in(CUDA)
    found = effective(
        [
            (
                "/etc/unit",
                VENDOR + "[Service]\nEnvironmentFile=/etc/default/ollama\nEnvironment=OLLAMA_ORIGINS=* A=1\n",
            ),
            ("/etc/10-a.conf", "[Service]\nEnvironment=OLLAMA_HOST=0.0.0.0\n"),
            (f"/etc/{DROPIN}", ours),
            ("/etc/proxy.conf", "[Service]\nEnvironment=HTTPS_PROXY=http://p:1\nProtectHome=yes\n"),
        ]
    )
    number = ours.splitlines().index('Environment="OLLAMA_HOST=127.0.0.1:11434"') + 1
    assert found.environment["OLLAMA_HOST"] == ("127.0.0.1:11434", Origin(f"/etc/{DROPIN}", number))
    assert found.environment["A"] == ("1", Origin("/etc/unit", 17))
    assert found.environment["HTTPS_PROXY"] == ("http://p:1", Origin("/etc/proxy.conf", 2))
    # Unset by ours, whoever sets it; a file of variables would win over what ours says.
    assert "OLLAMA_ORIGINS" not in found.environment
    assert "EnvironmentFile" not in found.keys
    assert found.last("ProtectHome") == ("yes", Origin("/etc/proxy.conf", 3))
    assert found.last("User") is not None


def test_an_empty_value_takes_away_what_was_said() -> None:
    found = effective([("/a", "Environment=A=1\nEnvironment=\nEnvironment=B=2\nReadOnlyPaths=/x\nReadOnlyPaths=\n")])
    assert (list(found.environment), found.last("ReadOnlyPaths")) == (["B"], None)


def test_drop_ins_are_read_by_name_whatever_folder_they_lie_in() -> None:
    names = ["/run/s.d/60-a.conf", "/etc/s.d/50-volta.conf", "/usr/lib/s.d/10-b.conf", "/etc/s.d/override.conf"]
    assert [Path(path).name for path in in_order("/etc/s.service", names)] == [
        "s.service",
        "10-b.conf",
        "50-volta.conf",
        "60-a.conf",
        "override.conf",
    ]
    assert in_order("", []) == []
