# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Several servers of one machine: what they share, and what they must not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.module_utils.faults import Fault, in_variables
from ansible_collections.volta.llm.plugins.module_utils.serving.arguments import Plan, Settings, Surroundings, plan
from ansible_collections.volta.llm.plugins.module_utils.serving.instances import (
    MARK,
    Server,
    collisions,
    leftover_units,
    named,
    servers,
)

BUS_IDS = ("0000:1a:00.0", "0000:1c:00.0", "0000:1d:00.0", "0000:1e:00.0")
UUIDS = {bus: f"GPU-0000000{number}-aaaa-bbbb-cccc-000000000000" for number, bus in enumerate(BUS_IDS)}
BASE = Settings(
    "/srv/a.gguf", alias="a", gpus=["0", "1"], api_key_file="/etc/llama-server/api-keys", api_keys=["k" * 16]
)


def planned(*instances: dict[str, Any], base: Settings = BASE) -> list[tuple[Server, Plan]]:
    found, faults = servers(base, instances)
    assert faults == []
    around = Surroundings(gpu_bus_ids=BUS_IDS, gpu_uuids=UUIDS)
    return [(server, plan(server.settings, around)) for server in found]


def test_an_instance_is_as_the_default_server_but_for_what_it_says() -> None:
    found, faults = servers(BASE, [{"name": "b", "port": 8081, "parallel": 3, "alias": None, "gpus": None}])
    assert faults == []
    default, other = found
    assert (default.unit, default.service, default.settings) == ("llama-server", "llama-server.service", BASE)
    assert other.service == "llama-server@b.service"
    assert (other.settings.port, other.settings.parallel, other.settings.model) == (8081, 3, "/srv/a.gguf")
    assert other.settings.api_keys == BASE.api_keys
    assert other.settings.api_key_file == "/etc/llama-server/api-keys-b"
    # A name and cards are had by one.
    assert (other.settings.alias, list(other.settings.gpus)) == ("", [])


def test_zero_leaves_the_choice_to_the_engine_as_in_the_role() -> None:
    base = replace(BASE, threads=8, ubatch=256, timeout=60)
    found, faults = servers(base, [{"name": "b", "port": 8081, "threads": 0, "ubatch": 0, "timeout": 0}])
    settings = found[1].settings
    assert (faults, settings.threads, settings.ubatch, settings.timeout) == ([], None, None, None)
    # What is no number to choose is no choice.
    assert [fault.subject for fault in planned({"name": "b", "port": 0, "gpus": ["2"]})[1][1].faults] == ["port"]


@pytest.mark.parametrize("name", ["", "B", "a b", "-a", "a-", "a/b", "a@b", "a_b", "x" * 40])
def test_what_names_no_instance(name: str) -> None:
    found, (fault,) = servers(BASE, [{"name": name, "port": 8081}])
    assert len(found) == 1
    assert (fault.code, fault.subject) == ("setting_invalid", "instances[0]")


def test_a_name_is_had_by_one() -> None:
    found, (fault,) = servers(BASE, [{"name": "b", "port": 8081}, {"name": "b", "port": 8082}])
    assert len(found) == 2
    assert "is there twice" in fault.message


def test_faults_say_which_instance() -> None:
    server = planned({"name": "b", "port": 70000, "gpus": ["2"]})[1]
    (fault,) = named(server[0], server[1].faults)
    assert fault.subject == "instances[b]: port"
    (shown,) = in_variables([fault], "llama_server_", ["instances", "port"])
    assert shown.subject == "llama_server_instances[b]: port"


def test_servers_of_their_own_ports_and_cards() -> None:
    assert collisions(planned({"name": "b", "port": 8081, "gpus": ["2", "0000:1e:00.0"]})) == []


@pytest.mark.parametrize("same", ["1", "0000:1c:00.0", "1C:00.0", UUIDS["0000:1c:00.0"]])
def test_a_card_by_any_of_its_names_is_the_same_card(same: str) -> None:
    (fault,) = collisions(planned({"name": "b", "port": 8081, "gpus": ["3", same]}))
    assert fault.code == "instances_collide"
    assert fault.message == "llama-server and llama-server@b both use 0000:1c:00.0"


def test_everything_that_collides_is_one_message() -> None:
    (fault,) = collisions(planned({"name": "b", "port": 8080}, {"name": "c", "port": 8081, "gpus": ["3"]}))
    assert fault.message.split("; ") == [
        "llama-server and llama-server@b both listen on port 8080",
        "llama-server and llama-server@b share cards, since llama-server@b uses all of them",
        "llama-server@b and llama-server@c share cards, since llama-server@b uses all of them",
    ]
    assert "gpus" in fault.remedy


def test_a_server_without_gpus_is_in_nobody_s_way() -> None:
    assert collisions(planned({"name": "b", "port": 8081, "backend": "cpu"})) == []


def test_unknown_cards_are_compared_as_they_were_written() -> None:
    uuid = "GPU-99999999-aaaa-bbbb-cccc-000000000000"
    found, _ = servers(Settings("/srv/a.gguf", gpus=[uuid]), [{"name": "b", "port": 8081, "gpus": [uuid]}])
    (fault,) = collisions([(server, plan(server.settings, Surroundings())) for server in found])
    assert uuid in fault.message


def test_only_our_own_units_are_left_over(tmp_path: Path) -> None:
    for name, text in {
        "llama-server@old.service": f"{MARK}: x\n[Unit]\n",
        "llama-server@kept.service": f"{MARK}: x\n[Unit]\n",
        "llama-server@theirs.service": "[Unit]\n",
        "llama-server@.service": f"{MARK}: x\n[Unit]\n",
        "llama-server.service": f"{MARK}: x\n[Unit]\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert leftover_units(tmp_path, "llama-server", ["llama-server", "llama-server@kept"]) == ["llama-server@old"]
    assert leftover_units(tmp_path / "none", "llama-server", []) == []


def test_no_instance_is_no_collision() -> None:
    faults: list[Fault] = collisions(planned())
    assert faults == []
