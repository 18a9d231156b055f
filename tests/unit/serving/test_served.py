# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a machine serves, read from units that the role itself renders, and what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.machine import Completed
from ansible_collections.volta.llm.plugins.module_utils.serving.arguments import Settings, Surroundings, plan
from ansible_collections.volta.llm.plugins.module_utils.serving.served import look, missing, words_of
from ansible_collections.volta.llm.plugins.module_utils.serving.unit import Unit, render
from ansible_collections.volta.llm.plugins.module_utils.transfer.store import Places, Stamp
from hypothesis import given
from hypothesis import strategies as st

SETTINGS = Settings(
    "",
    alias="demo",
    host="0.0.0.0",
    port=8080,
    context_per_request=8000,
    parallel=2,
    api_keys=["k" * 20],
    api_key_file="/etc/llama-server/api-keys",
)


def systemd(again: int | None = 2, **changed: str) -> object:
    """``again``: so many restarts are in the journal; null where it may not be read."""
    shown = {
        "ActiveState": "active",
        "SubState": "running",
        "UnitFileState": "enabled",
        "NeedDaemonReload": "no",
        "NRestarts": "0",
        "Result": "success",
        "ActiveEnterTimestamp": "Mon 2026-11-30 12:10:01 UTC",
        "StatusText": "ready on port 8080",
        "DropInPaths": "",
        **changed,
    }

    def runner(argv: Sequence[str], timeout: float) -> Completed:
        if argv[0] == "journalctl":
            assert argv[1].startswith("UNIT=llama-server")
            line = "llama-server.service: Scheduled restart job, restart counter is at 1.\n"
            return Completed(tuple(argv), 1 if again is None else 0, stdout=line * (again or 0))
        return Completed(tuple(argv), 0, stdout="\n".join(f"{name}={value}" for name, value in shown.items()))

    return runner


class Ground:
    """A machine's unit folder and a model of two shards, verified."""

    def __init__(self, root: Path) -> None:
        self.units = root / "units"
        self.units.mkdir()
        self.calibrated = root / "calibration.json"
        self.engine = root / "llama-server"
        self.engine.touch()
        self.shards = [root / f"m n-0000{number}-of-00002.gguf" for number in (1, 2)]
        for shard in self.shards:
            shard.write_bytes(b"GGUF")
            places = Places(shard)
            places.folder.mkdir(exist_ok=True)
            Stamp.of(shard.stat(), "a" * 64, "test", "sha256").write(places.stamp)

    def write(self, name: str = "llama-server", **changed: object) -> Path:
        given = {"model": str(self.shards[0]), "binary": str(self.engine), **changed}
        settings = replace(SETTINGS, **given)  # type: ignore[arg-type]
        computed = plan(settings, Surroundings())
        path = self.units / f"{name}.service"
        path.write_text(
            render(
                Unit(
                    name=name,
                    description="d",
                    user="u",
                    group="u",
                    argv=computed.argv,
                    environment=computed.environment,
                    guard="/guard",
                    python="/usr/bin/python3",
                    health_url="http://127.0.0.1:8080/health",
                    port=settings.port,
                    load_timeout=240,
                )
            )
        )
        return path

    def look(self, again: int | None = 2, **shown: str) -> tuple[list[dict[str, object]], list[str], str]:
        found = look(folder=self.units, runner=systemd(again, **shown), calibrated=self.calibrated)  # type: ignore[arg-type]
        faults = [fault for unit in found for fault in unit.faults]
        return [unit.server for unit in found], [fault.code for fault in faults], " ".join(f.message for f in faults)


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    return Ground(tmp_path)


def test_what_was_rendered_is_read_again(ground: Ground) -> None:
    ground.write()
    [server], codes, _ = ground.look()
    assert codes == []
    assert {
        name: server[name] for name in ("alias", "base_url", "host", "port", "parallel", "has_keys", "at_boot")
    } == {
        "alias": "demo",
        "base_url": "http://127.0.0.1:8080/v1",
        "host": "0.0.0.0",
        "port": 8080,
        "parallel": 2,
        "has_keys": True,
        "at_boot": True,
    }
    # 8000 is padded to 8192 by the plan.
    assert (server["context_per_request"], server["load_timeout"], server["backend"]) == (8192, 240, "cuda")
    assert server["model_files"] == [str(path) for path in ground.shards]
    assert (server["state"], server["restarts"]) == ("active (running)", 2)


def test_a_server_without_key_with_tls_on_the_cpu(ground: Ground) -> None:
    ground.write(host="127.0.0.1", api_keys=(), backend="cpu", tls={"certificate": "/c", "key": "/k"})
    [server], _, _ = ground.look()
    assert (server["has_keys"], server["backend"], server["base_url"]) == (False, "cpu", "https://127.0.0.1:8080/v1")


def test_instances_come_after_the_default_one_and_the_template_is_none(ground: Ground) -> None:
    ground.write("llama-server@small", port=8081)
    ground.write()
    (ground.units / "llama-server@.service").write_text("[Service]\n")
    (ground.units / "llama-server-maintenance.service").write_text("[Service]\n")
    servers, codes, _ = ground.look()
    assert [server["name"] for server in servers] == ["llama-server", "llama-server@small"]
    assert codes == []


def test_nothing_is_served(ground: Ground) -> None:
    assert ground.look() == ([], [], "")
    assert missing("llama-server").code == "nothing_served"


@pytest.mark.parametrize(
    ("shown", "code", "said"),
    [
        (
            {"ActiveState": "failed", "SubState": "failed", "StatusText": "signal: x"},
            "service_not_running",
            "signal: x",
        ),
        ({"ActiveState": "inactive", "SubState": "dead", "StatusText": ""}, "service_not_running", "inactive"),
        ({"UnitFileState": "disabled"}, "service_not_enabled", "boot"),
        ({"NeedDaemonReload": "yes"}, "unit_changed", "former one"),
    ],
)
def test_what_systemd_says(ground: Ground, shown: dict[str, str], code: str, said: str) -> None:
    ground.write()
    _, codes, text = ground.look(**shown)
    assert codes == [code]
    assert said in text


@pytest.mark.parametrize(
    ("again", "codes"), [(None, []), (0, []), (2, []), (3, ["service_restarted"]), (40, ["service_restarted"])]
)
def test_a_server_that_dies_and_comes_back_is_not_well(ground: Ground, again: int | None, codes: list[str]) -> None:
    """systemd's own counter is back at 0 after each start that succeeds."""
    ground.write()
    [server], found, said = ground.look(again)
    assert (server["restarts"], found) == (again, codes)
    assert not codes or f"{again} times within a day" in said


def test_one_that_was_stopped_is_only_to_be_started(ground: Ground) -> None:
    ground.write()
    stopped = {"ActiveState": "inactive", "SubState": "dead"}
    unit = look(folder=ground.units, runner=systemd(**stopped), calibrated=ground.calibrated)[0]  # type: ignore[arg-type]
    [fault] = unit.faults
    assert fault.message == "inactive (dead), it was stopped and did not fail"
    assert fault.remedy == "systemctl start llama-server, unless it is stopped on purpose"


def test_an_engine_that_is_gone_is_why_a_server_does_not_run(ground: Ground) -> None:
    """The link `current` was removed: systemd has only an exit status to say of it."""
    ground.write()
    ground.engine.unlink()
    _, codes, text = ground.look(ActiveState="failed", SubState="failed", StatusText="")
    assert codes == ["engine_missing", "service_not_running"]
    assert "no such program" in text


def test_a_server_that_loads_is_no_fault_yet(ground: Ground) -> None:
    ground.write()
    assert ground.look(ActiveState="activating", SubState="start-post")[1] == []


def test_a_drop_in_that_changes_the_unit(ground: Ground) -> None:
    folder = ground.units / "llama-server.service.d"
    folder.mkdir()
    ground.write()
    (folder / "override.conf").write_text("[Service]\nExecStart=\nExecStart=/bin/other\n")
    assert ground.look()[1] == ["unit_overridden"]


def test_files_that_are_not_what_was_verified(ground: Ground) -> None:
    ground.write()
    ground.shards[1].write_bytes(b"GGUF and more")
    _, codes, text = ground.look()
    assert codes == ["model_unverified"]
    assert "m n-00002-of-00002.gguf changed since it was verified" in text
    ground.shards[1].unlink()
    _, codes, text = ground.look()
    assert codes == ["model_unverified"]
    assert "is not there" in text


def test_what_it_held_at_its_proof_stands_for_what_was_counted(ground: Ground) -> None:
    ground.write()
    gpus = [{"uuid": "GPU-a", "bus_id": "0000:1a:00.0", "counted_mib": 20000.0, "measured_mib": 20300.0}]
    ground.calibrated.write_text(json.dumps({"version": 1, "servers": {"llama-server.service": {"gpus": gpus}}}))
    [server], _, _ = ground.look()
    assert [gpu["counted_mib"] for gpu in server["memory"]] == [20300.0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kept", [3, None, {}, {"gpus": None}, {"gpus": [3, {"measured_mib": 20300.0}]}])
def test_a_calibration_that_says_nothing_of_the_server(ground: Ground, kept: object) -> None:
    ground.write()
    ground.calibrated.write_text(json.dumps({"version": 1, "servers": {"llama-server.service": kept}}))
    [server], codes, _ = ground.look()
    assert server["memory"] == []  # type: ignore[index]
    assert codes == []


@given(st.lists(st.text(st.characters(min_codepoint=32, max_codepoint=0x2FFF, exclude_characters="\x7f"), min_size=1)))
def test_the_words_of_a_command_are_read_as_they_were_written(words: list[str]) -> None:
    from ansible_collections.volta.llm.plugins.module_utils.serving.unit import quote

    # What systemd does not take as one word without quotes, other kinds of white space included, no argument has.
    words = ["".join(char for char in word if not char.isspace() or char == " ") or "x" for word in words]
    assert words_of(" ".join(map(quote, words))) == words


def test_a_command_that_cannot_be_read_has_no_words() -> None:
    assert words_of('/bin/x "open') == []
