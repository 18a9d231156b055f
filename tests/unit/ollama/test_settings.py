# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What is judged of Ollama's settings before anything is downloaded, on a machine that is played by files."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.module_utils.machine import Completed, Machine
from ansible_collections.volta.llm.plugins.module_utils.ollama import folders
from ansible_collections.volta.llm.plugins.module_utils.ollama.settings import Options, Settings, largest, prepare
from ansible_collections.volta.llm.plugins.module_utils.ollama.unit import MARK, base
from ansible_collections.volta.llm.plugins.module_utils.serving.dropins import lines_of
from ansible_collections.volta.llm.plugins.module_utils.serving.handover import card, record
from ansible_collections.volta.llm.plugins.module_utils.serving.preparation import Prepared

BUSES = ["0000:1a:00.0", "0000:1c:00.0", "0000:1d:00.0", "0000:1e:00.0"]
UUIDS = [f"GPU-{number}d8f1c2e-1111-2222-3333-444444444444" for number in range(4)]
VENDOR = (
    "[Unit]\nDescription=Ollama Service\nAfter=network-online.target\n\n"
    "[Service]\nExecStart=/usr/local/bin/ollama serve\n"
    'User=ollama\nGroup=ollama\nRestart=always\nRestartSec=3\nEnvironment="PATH=/usr/bin"\n\n[Install]\n'
    "WantedBy=default.target\n"
)


@dataclass
class Played:
    """A machine with four V100 under driver 535, and its systemd. ``apps`` are lines of nvidia-smi's list of
    processes."""

    root: Path
    driver: str | None = "535.183.01"
    device: str = "0x1db5"
    count: int = 4
    apps: list[str] = field(default_factory=list)
    fragment: str = ""
    drop_ins: list[str] = field(default_factory=list)
    no_systemd: bool = False
    #: What `ip -json address show` says; empty where there is no such program.
    links: str = ""

    @property
    def units(self) -> Path:
        return self.root / "units"

    @property
    def beside(self) -> Path:
        folder = self.units / "ollama.service.d"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def put(self, path: str, text: str) -> None:
        file = self.root / "sysroot" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def machine(self) -> Machine:
        for bus, uuid in list(zip(BUSES, UUIDS, strict=True))[: self.count]:
            for name, value in (("vendor", "0x10de"), ("class", "0x030200"), ("device", self.device)):
                self.put(f"sys/bus/pci/devices/{bus}/{name}", value + "\n")
            if self.driver:
                text = f"Model: \t\t Tesla V100\nGPU UUID: \t {uuid}\nBus Location: \t {bus}\n"
                self.put(f"proc/driver/nvidia/gpus/{bus}/information", text)
        if self.driver:
            self.put(
                "proc/driver/nvidia/version", f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {self.driver}  Wed\n"
            )
        cards = "".join(
            f"0000{bus.upper()}, {uuid}, Tesla V100-SXM2-32GB, 32768, 7.0\n"
            for bus, uuid in list(zip(BUSES, UUIDS, strict=True))[: self.count]
        )
        asked = {
            "cards": ["--query-gpu=pci.bus_id,uuid,name,memory.total,compute_cap", cards],
            "apps": ["--query-compute-apps=gpu_bus_id,pid,process_name,used_memory", "".join(self.apps)],
        }
        records = []
        for name, (query, text) in asked.items():
            self.put(f"commands/{name}", text)
            argv = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
            records.append({"argv": argv, "rc": 0 if self.driver else 9, "stdout": name})
        self.put("commands/index.json", json.dumps(records))
        return Machine(str(self.root / "sysroot"))

    def __call__(self, argv: Sequence[str], timeout: float) -> Completed:
        words = tuple(argv)
        if argv[0] == "systemctl" and not self.no_systemd:
            assert argv[1] == "show"
            values = {"FragmentPath": self.fragment, "DropInPaths": " ".join(self.drop_ins), "ActiveState": "inactive"}
            return Completed(words, 0, stdout="\n".join(f"{key}={value}" for key, value in values.items()))
        if argv[0] == "ip" and self.links:
            return Completed(words, 0, stdout=self.links)
        return Completed(words, None, missing=True)

    def judge(self, here: Machine | None = None, **settings: Any) -> Prepared:
        values = {"models_directory": str(self.root / "store"), "port": free_port(), **settings}
        options = Options(unit_folder=self.units, folder=str(self.root / "etc"))
        return prepare(Settings(**values), options, self.machine(), here=here, runner=self)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    (tmp_path / "units").mkdir()
    # Where pytest has its folders; a server's models would not last there.
    monkeypatch.setattr(folders, "_NO_PLACE", ("/run",))
    return Played(tmp_path)


@pytest.fixture
def busy() -> Iterator[socket.socket]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server


def codes(found: Prepared) -> list[str]:
    return [fault.code for fault in found.faults]


def only(found: Prepared) -> tuple[str, str, str]:
    """Code, subject and message with remedy of the single fault."""
    (fault,) = found.faults
    return fault.code, fault.subject, f"{fault.message} -> {fault.remedy}"


def variables(found: Prepared) -> dict[str, str]:
    return dict(found.results["environment"])


# --- what is written --------------------------------------------------------------------------------------------------


def test_defaults_on_a_bare_machine(played: Played) -> None:
    found = played.judge()
    assert codes(found) == []
    assert found.results["unit"] == base()
    assert found.results["client_filter"] is None
    assert found.results["gpu_count"] == 4
    assert found.results["root_url"].startswith("http://127.0.0.1:")
    environment = variables(found)
    assert environment["OLLAMA_CONTEXT_LENGTH"] == "8192"
    assert environment["OLLAMA_NUM_PARALLEL"] == "1"
    assert environment["OLLAMA_KEEP_ALIVE"] == "30m"
    assert environment["OLLAMA_MAX_LOADED_MODELS"] == "1"
    assert environment["OLLAMA_NO_CLOUD"] == "true"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    # Left to Ollama, and to nobody who wrote it elsewhere.
    unset = next(line.value for line in lines_of(found.results["dropin"]) if line.key == "UnsetEnvironment")
    assert {"CUDA_VISIBLE_DEVICES", "OLLAMA_FLASH_ATTENTION", "OLLAMA_ORIGINS"} <= set(unset.split())
    assert not set(unset.split()) & set(environment)


def test_the_same_settings_say_the_same(played: Played) -> None:
    port = free_port()
    first = played.judge(port=port, gpus=["0"], models=[{"name": "qwen3:8b"}]).results["dropin"]
    store = played.root / "store"
    manifest = store / "manifests/registry.ollama.ai/library/qwen3/8b"
    manifest.parent.mkdir(parents=True)
    manifest.write_text('{"layers": []}')
    for folder in (store, store / "manifests"):
        folder.chmod(0o777)
    assert played.judge(port=port, gpus=["0"], models=[{"name": "qwen3:8b"}]).results["dropin"] == first


def test_cards_are_named_by_uuid(played: Played) -> None:
    for name in ("1", "0000:1c:00.0", "1c:00.0", UUIDS[1]):
        found = played.judge(gpus=[name])
        assert (codes(found), variables(found)["CUDA_VISIBLE_DEVICES"]) == ([], UUIDS[1]), name
        assert (found.results["gpus"], found.results["gpu_count"]) == ([BUSES[1]], 1)
    played.driver = None
    # Without a driver nobody knows UUIDs; an index is in bus order, as CUDA is told to count.
    for folder in (played.root / "sysroot/proc").iterdir():
        folder.rename(played.root / "gone")
    assert variables(played.judge(gpus=["1c:00.0"]))["CUDA_VISIBLE_DEVICES"] == "1"


def test_the_library_of_cuda_12_is_forced_on_v100(played: Played) -> None:
    assert variables(played.judge())["OLLAMA_LLM_LIBRARY"] == "cuda_v12"
    played.device = "0x2335"
    found = played.judge()
    assert ("OLLAMA_LLM_LIBRARY" in variables(found), found.results["llm_library"]) == (False, None)
    assert codes(played.judge(llm_library="cuda_v13")) == []


@pytest.mark.parametrize(
    ("asked", "code"),
    [("cuda_v12", ""), ("cuda_v13", "ollama_library_unusable"), ("cpu", "setting_invalid"), ("", "setting_invalid")],
)
def test_a_library_without_code_for_the_cards(played: Played, asked: str, code: str) -> None:
    assert codes(played.judge(llm_library=asked)) == ([code] if code else [])


def test_without_gpus(played: Played) -> None:
    played.count = 0
    code, subject, text = only(played.judge())
    assert (code, subject) == ("setting_invalid", "backend")
    assert "`backend`: cpu" in text
    found = played.judge(backend="cpu")
    assert codes(found) == []
    assert (variables(found)["OLLAMA_LLM_LIBRARY"], variables(found)["CUDA_VISIBLE_DEVICES"]) == ("cpu", "-1")
    assert found.results["gpu_count"] is None
    assert codes(played.judge(backend="cpu", gpus=["0"])) == ["setting_invalid"]


def test_time_for_loading_goes_by_the_largest_model(played: Played, tmp_path: Path) -> None:
    """F18 ollama/ollama#4131, #6092, #10517."""
    assert variables(played.judge())["OLLAMA_LOAD_TIMEOUT"] == "600s"
    models = [{"name": "a", "size": 5_000_000_000}, {"name": "b", "size": 120_000_000_000}]
    assert variables(played.judge(models=[models[0]]))["OLLAMA_LOAD_TIMEOUT"] == "600s"
    played.root.joinpath("store").mkdir()
    found = prepare_with_room(played, models)
    assert int(variables(found)["OLLAMA_LOAD_TIMEOUT"].rstrip("s")) >= 120_000_000_000 // 150_000_000
    assert variables(played.judge(load_timeout=1200))["OLLAMA_LOAD_TIMEOUT"] == "1200s"
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert largest([{"name": "c", "gguf": str(tmp_path / "m.gguf")}]) == 4


def prepare_with_room(played: Played, models: list[dict[str, Any]]) -> Prepared:
    """As if the models were in the store already, whose room is then not asked for."""
    for model in models:
        manifest = played.root / "store/manifests/registry.ollama.ai/library" / model["name"] / "latest"
        manifest.parent.mkdir(parents=True)
        manifest.write_text("{}")
    (played.root / "store/manifests").chmod(0o777)
    return played.judge(models=models)


def test_an_older_release_is_told_what_it_knows(played: Played) -> None:
    found = played.judge(version="0.12.0")
    assert codes(found) == []
    assert "OLLAMA_NO_CLOUD" not in found.results["dropin"]
    assert any("no OLLAMA_NO_CLOUD" in note for note in found.results["notes"])


def test_ipv6(played: Played) -> None:
    found = played.judge(host="::1")
    assert variables(found)["OLLAMA_HOST"].startswith("[::1]:")
    assert found.results["base_url"].startswith("http://[::1]:")


@pytest.mark.parametrize(
    "address", ["http://user:geheim@proxy:3128", "user:geheim@proxy:3128", "http://u:geheim%2F1@p:1"]
)
def test_a_login_is_in_no_file_that_everybody_reads(played: Played, address: str) -> None:
    plain = played.judge(environment={"NO_PROXY": "localhost", "HTTP_PROXY": "http://proxy:3128"})
    assert (plain.results["secrets_file"], plain.results["secret_names"]) == (None, [])
    assert "EnvironmentFile=/" not in plain.results["dropin"]
    found = played.judge(environment={"HTTPS_PROXY": address, "NO_PROXY": "localhost"})
    assert found.faults == []
    assert "geheim" not in repr(found)
    path = str(played.root / "etc" / "secrets.env")
    assert (found.results["secrets_file"], found.results["secret_names"]) == (path, ["HTTPS_PROXY"])
    assert f"EnvironmentFile={path}" in found.results["dropin"].splitlines()
    (entry,) = [entry for entry in found.results["effective_environment"] if entry["name"] == "HTTPS_PROXY"]
    assert entry["file"] == path
    Path(path).parent.mkdir()
    Path(path).write_text("old", encoding="ascii")
    assert played.judge().results["absent_files"] == [path]


@pytest.mark.parametrize("secret", ["geheim/1", 'geheim"1', "geheim 1", "geheim@1", "geheim\\1"])
def test_a_login_that_no_address_can_have_is_refused_and_not_shown(played: Played, secret: str) -> None:
    found = played.judge(environment={"HTTPS_PROXY": f"http://user:{secret}@proxy:3128"})
    assert codes(found) == ["ollama_variable_invalid"]
    assert "%40" in found.faults[0].remedy
    assert "geheim" not in repr(found)


def test_a_login_in_an_address_is_not_shown(played: Played) -> None:
    found = played.judge(environment={"HTTPS_PROXY": "http://user:geheim@proxy:3128"})
    assert "geheim" not in json.dumps(found.results)
    assert variables(found)["HTTPS_PROXY"] == "http://...@proxy:3128"


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "code", "said"),
    [
        ({"version": "latest"}, "ollama_version_invalid", "would change from run to run"),
        ({"version": "v0.24.0"}, "ollama_version_invalid", "Write 0.24.0."),
        ({"version": "0.5.12"}, "ollama_version_invalid", "0.5.13 or newer"),
        ({"version": "0.30.5"}, "ollama_ignores_gpu", "0.24.0"),
        ({"user": "root"}, "account_unusable", "as ollama"),
        ({"host": "example.org"}, "setting_invalid", "not an address"),
        ({"port": 80}, "setting_invalid", "1024"),
        ({"context_length": 100}, "setting_invalid", "512"),
        ({"num_parallel": 0}, "setting_invalid", "1 to 256"),
        ({"keep_alive": "1d"}, "setting_invalid", "would take 5 minutes"),
        ({"load_timeout": -1}, "setting_invalid", "0 to"),
        ({"device_timeout": 86400}, "setting_invalid", "0 to 3600"),
        ({"kv_cache_type": "q8_0"}, "setting_invalid", "`flash_attention` on"),
        ({"kv_cache_type": "q5_1", "flash_attention": "on"}, "setting_invalid", "f16, q8_0, q4_0"),
        ({"origins": ["chat.example.org"]}, "setting_invalid", "would not start"),
        ({"conflicts": ["llama-server"]}, "setting_invalid", "llama-server.service"),
        ({"conflicts": ["ollama.service"]}, "setting_invalid", "no other service"),
        ({"gpus": ["9"]}, "gpu_unknown", "not an index of 4"),
        ({"gpus": ["0", "1a:00.0"]}, "setting_invalid", "named twice"),
        ({"environment": {"OLLAMA_NUM_GPU": "4"}}, "ollama_variable_unknown", "`gpus`"),
        ({"environment": {"OLLAMA_HOST": "0.0.0.0"}}, "ollama_variable_managed", "`host`"),
        ({"models": [{"name": "qwen3:8b:q4"}]}, "model_name_invalid", "tag"),
        ({"models": [{"name": "a"}, {"name": "A:latest"}]}, "setting_invalid", "twice"),
        ({"models": [{"name": "a", "gguf": "/srv/m-00001-of-00004.gguf"}]}, "ollama_sharded_model", "shards"),
        ({"models": [{"name": "a", "architecture": "qwen4exp"}]}, "ollama_without_architecture", "llama-server"),
        ({"models": [{"name": "a", "size": 10**17}]}, "disk_full", "missing"),
        ({"models": [{"name": "a", "size": "5 GB"}]}, "setting_invalid", "bytes"),
        ({"models_directory": "/opt/ollama/models"}, "setting_invalid", "removed together"),
    ],
)
def test_what_is_refused(played: Played, settings: dict[str, Any], code: str, said: str) -> None:
    found, _, text = only(played.judge(**settings))
    assert (found, said in text) == (code, True), text


def test_all_findings_come_at_once(played: Played) -> None:
    found = played.judge(version="latest", port=80, keep_alive="x", environment={"OLLAMA_NUM_GPU": 1}, gpus=["9"])
    assert len(codes(found)) == 5


def test_a_quantised_cache_with_flash_attention(played: Played) -> None:
    found = played.judge(kv_cache_type="q8_0", flash_attention="on")
    assert codes(found) == []
    assert (variables(found)["OLLAMA_KV_CACHE_TYPE"], variables(found)["OLLAMA_FLASH_ATTENTION"]) == ("q8_0", "true")
    assert variables(played.judge(flash_attention="off"))["OLLAMA_FLASH_ATTENTION"] == "false"


def test_a_newer_driver_admits_a_newer_release(played: Played) -> None:
    played.driver = "580.95.05"
    assert codes(played.judge(version="0.30.5")) == []


# --- who reaches it ---------------------------------------------------------------------------------------------------


def test_an_address_for_others_needs_a_word(played: Played) -> None:
    code, subject, text = only(played.judge(host="0.0.0.0"))
    assert (code, subject) == ("ollama_open_to_network", "host")
    assert "`allowed_clients`" in text
    assert "`open_to_network`: true" in text
    found = played.judge(host="0.0.0.0", open_to_network=True)
    assert (codes(found), found.results["client_filter"], found.results["files"]) == ([], None, [])


def test_allowed_clients_are_enforced_by_rules_of_its_own(played: Played) -> None:
    found = played.judge(host="0.0.0.0", allowed_clients=["192.168.10.0/24", "fd00::/8"])
    assert (codes(found), found.results["client_filter"]) == ([], "nftables")
    (file,) = found.results["files"]
    assert "volta.llm.ollama" in file["content"]
    assert "192.168.10.0/24" in file["content"]
    assert f"nft -f {file['path']}" in found.results["dropin"]
    old = Path(played.root / "etc/ollama-000000000000.nft")
    old.parent.mkdir()
    old.write_text("")
    assert played.judge().results["absent_files"] == [str(old)]
    # On loopback nobody else gets there.
    assert played.judge(allowed_clients=["192.168.10.0/24"]).results["client_filter"] is None


def test_containers_that_the_rules_keep_away(played: Played) -> None:
    """As for llama-server: clients such as Dify often run in containers on the machine itself."""
    address = {"local": "172.17.0.1", "prefixlen": 16, "scope": "global"}
    played.links = json.dumps([{"ifname": "docker0", "addr_info": [address]}])
    code, subject, text = only(played.judge(host="0.0.0.0", allowed_clients=["192.168.10.0/24"]))
    assert (code, subject) == ("containers_kept_out", "allowed_clients")
    assert "add 172.17.0.0/16 to `allowed_clients`" in text
    assert codes(played.judge(host="0.0.0.0", allowed_clients=["172.16.0.0/12"])) == []


@pytest.mark.parametrize("clients", [["10.0.0.0/99"], ["0.0.0.0/0"]])
def test_clients_that_are_none(played: Played, clients: list[str]) -> None:
    assert codes(played.judge(host="0.0.0.0", allowed_clients=clients)) == ["setting_invalid"]


def test_an_address_that_the_machine_does_not_have(played: Played) -> None:
    assert only(played.judge(host="192.0.2.1", open_to_network=True))[:2] == ("setting_invalid", "host")


def test_another_program_on_the_port(played: Played, busy: socket.socket) -> None:
    port = busy.getsockname()[1]
    code, subject, text = only(played.judge(port=port))
    assert (code, subject) == ("port_taken", f"127.0.0.1:{port}")
    assert f"pid {os.getpid()}" in text
    # It may have the port while this service does not run.
    assert codes(played.judge(port=port, state="stopped")) == []


# --- who has the GPUs -------------------------------------------------------------------------------------------------


def holder(played: Played, bus: str, unit: str, pid: int = 4242, mib: int = 20000) -> Machine:
    """A process on a card, run by a unit; the machine whose /proc tells so."""
    played.apps.append(f"0000{bus.upper()}, {pid}, /opt/llama.cpp/bin/llama-server, {mib}\n")
    played.put(f"proc/{pid}/cgroup", f"0::/system.slice/{unit}\n")
    return played.machine()


def test_another_engine_on_the_cards(played: Played) -> None:
    here = holder(played, BUSES[0], "llama-server.service")
    code, _, text = only(played.judge(here))
    assert code == "gpu_held"
    assert "llama-server.service" in text
    assert codes(played.judge(here, gpus=["2", "3"])) == []


def test_a_unit_that_gives_way_is_not_in_the_way(played: Played) -> None:
    here = holder(played, BUSES[0], "llama-server.service")
    found = played.judge(here, conflicts=["llama-server.service"])
    assert codes(found) == []
    assert "Conflicts=llama-server.service" in found.results["dropin"]
    assert found.results["conflicts"] == ["llama-server.service"]


def test_its_own_process_is_not_in_the_way(played: Played) -> None:
    assert codes(played.judge(holder(played, BUSES[0], "ollama.service"))) == []


def test_a_service_that_is_not_to_run_leaves_the_cards_to_others(played: Played) -> None:
    here = holder(played, BUSES[0], "llama-server.service")
    found = played.judge(here, state="stopped", models=[{"name": "qwen3:8b"}])
    assert codes(found) == []
    assert any("models come when it does" in note for note in found.results["notes"])


@pytest.mark.parametrize(
    ("gpus", "others", "shared"),
    [
        (["0", "1"], ["2", "3"], False),
        (["0", "1"], ["1", "2"], True),
        # The same card by other names.
        (["1"], [UUIDS[1]], True),
        (["1"], ["1c:00.0"], True),
        ([], ["0"], True),
        (["0"], ["all"], True),
        (["0"], [], False),
    ],
)
def test_two_engines_at_once_need_cards_of_their_own(
    played: Played, gpus: list[str], others: list[str], shared: bool
) -> None:
    assert codes(played.judge(gpus=gpus, other_gpus=others)) == (["engines_share_gpu"] if shared else [])


# --- the unit's files -------------------------------------------------------------------------------------------------


def test_a_unit_of_the_vendor_is_left_as_it_is(played: Played) -> None:
    file = played.units / "ollama.service"
    file.write_text(VENDOR)
    played.fragment = str(file)
    found = played.judge()
    assert (codes(found), found.results["unit"]) == ([], None)
    paths = {
        entry["name"]: (Path(entry["file"]).name, entry["line"]) for entry in found.results["effective_environment"]
    }
    assert paths["PATH"] == ("ollama.service", 11)
    assert paths["OLLAMA_HOST"][0] == "50-volta.conf"


def test_a_unit_that_came_after_systemd_looked(played: Played) -> None:
    (played.units / "ollama.service").write_text(VENDOR)
    assert played.judge().results["unit"] is None


def test_a_unit_of_a_package(played: Played, tmp_path: Path) -> None:
    file = tmp_path / "lib/ollama.service"
    file.parent.mkdir()
    file.write_text(VENDOR.replace("User=ollama", "User=ollama-daemon"))
    played.fragment = str(file)
    found = played.judge()
    # A distribution's unit is not one that was edited by hand.
    assert (codes(found), found.results["unit"]) == ([], None)


def test_a_unit_of_ours_is_ours(played: Played) -> None:
    (played.units / "ollama.service").write_text(f"{MARK}: of an earlier version\n")
    assert played.judge().results["unit"] == base()


def test_edits_in_the_vendor_s_unit_are_reported_and_kept(played: Played) -> None:
    """F10 ollama/ollama#2268, #1278, #9623, #6594."""
    file = played.units / "ollama.service"
    text = VENDOR.replace(
        "RestartSec=3\n",
        'RestartSec=3\nEnvironment="OLLAMA_HOST=0.0.0.0" "OLLAMA_DEBUG=1"\nEnvironment=OLLAMA_ORIGINS=*\n',
    )
    file.write_text(text)
    code, subject, said = only(played.judge())
    assert (code, subject) == ("ollama_unit_edited", str(file))
    assert "line 11: OLLAMA_HOST (set by our settings)" in said
    assert "line 11: OLLAMA_DEBUG (in force)" in said
    # The settings say "none", and so does the unit.
    assert "line 12: OLLAMA_ORIGINS (set by our settings)" in said
    assert file.read_text() == text


def test_a_forgotten_drop_in_that_wins(played: Played) -> None:
    """F12 ollama/ollama#9722."""
    stray = played.beside / "override.conf"
    stray.write_text('[Service]\nEnvironment="CUDA_VISIBLE_DEVICES=1"\n')
    code, subject, text = only(played.judge(gpus=["0"]))
    assert (code, subject) == ("unit_overridden", str(stray))
    assert "CUDA_VISIBLE_DEVICES" in text
    assert "(line 2)" in text
    stray.write_text('[Service]\nEnvironment="HTTPS_PROXY=http://p:1"\n')
    found = played.judge(gpus=["0"])
    assert codes(found) == []
    (entry,) = [entry for entry in found.results["effective_environment"] if entry["name"] == "HTTPS_PROXY"]
    assert (entry["file"], entry["line"]) == (str(stray), 2)


def test_a_drop_in_elsewhere_that_systemd_has_read(played: Played, tmp_path: Path) -> None:
    stray = tmp_path / "run/99-x.conf"
    stray.parent.mkdir()
    stray.write_text("[Service]\nUser=root\n")
    played.drop_ins = [str(stray)]
    assert only(played.judge())[:2] == ("unit_overridden", str(stray))


def test_a_masked_unit(played: Played) -> None:
    (played.units / "ollama.service").symlink_to("/dev/null")
    code, _, text = only(played.judge())
    assert (code, "systemctl unmask ollama.service" in text) == ("unit_overridden", True)


def test_no_systemd_is_said(played: Played) -> None:
    played.no_systemd = True
    assert codes(played.judge()) == ["service_control_failed"]


def test_a_folder_that_a_later_file_hides(played: Played) -> None:
    """F08 ollama/ollama#10672, #2701."""
    file = played.units / "ollama.service"
    file.write_text(VENDOR.replace("RestartSec=3\n", "RestartSec=3\nProtectHome=yes\n"))
    # In the unit itself it does no harm: our drop-in comes after it.
    assert codes(played.judge(models_directory="/home/ollama_models")) == ["ollama_unit_edited"]
    file.write_text(VENDOR)
    stray = played.beside / "hardening.conf"
    stray.write_text("[Service]\nProtectHome=yes\n")
    faults = {fault.code: fault for fault in played.judge(models_directory="/home/ollama_models").faults}
    assert set(faults) == {"unit_overridden", "ollama_folder_hidden"}
    assert f"ProtectHome=yes of {stray} (line 2) hides it" in faults["ollama_folder_hidden"].message


def test_a_parent_that_keeps_the_service_out(played: Played) -> None:
    closed = played.root / "closed"
    closed.mkdir(mode=0o700)
    assert only(played.judge(models_directory=str(closed / "models")))[:2] == ("ollama_folder_unreachable", str(closed))


# --- hand-over --------------------------------------------------------------------------------------------------------


def test_endpoints_have_the_form_of_llama_server_s(played: Played) -> None:
    found = played.judge(port=11434, models=[{"name": "qwen3:8b"}, {"name": "gemma3"}], state="stopped")
    first, second = found.results["endpoints"]
    assert (first["alias"], second["alias"]) == ("qwen3:8b", "gemma3")
    made = record(first, {"context_per_request": 8192}, "gpu1.example.org")
    assert (made["base_url"], made["api_key"]) == ("http://127.0.0.1:11434/v1", {"required": False, "file": None})
    assert "none is asked for" in card(made)
