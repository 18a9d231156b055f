# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""How modules end, and that a role's faults name the role's variables, which are all that its operator has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

import pytest
from ansible_collections.volta.llm.plugins.module_utils.faults import Catalogue, Fault, FaultKind, as_text
from ansible_collections.volta.llm.plugins.module_utils.results import finish
from ansible_collections.volta.llm.plugins.module_utils.serving.arguments import Settings, Surroundings, plan


class Ended(Exception):
    """A module ended; ``results`` as it gave them, ``msg`` only where it failed."""

    def __init__(self, results: dict[str, Any]) -> None:
        self.results = results


class Module:
    def __init__(self, **params: Any) -> None:
        self.params = params

    def exit_json(self, **results: Any) -> NoReturn:
        raise Ended(results)

    def fail_json(self, msg: str, **results: Any) -> NoReturn:
        raise Ended({"msg": msg, **results})


def ended(faults: list[Fault], **params: Any) -> dict[str, Any]:
    with pytest.raises(Ended) as end:
        finish(Module(**params), faults, changed=False)
    results: dict[str, Any] = end.value.results
    return results


def of_role(subject: str, message: str = "", remedy: str = "") -> dict[str, str]:
    options = dict.fromkeys(("host", "api_keys", "api_key_file", "cache_type_v", "parallel", "files"))
    (fault,) = ended([Fault("some_code", subject, message, remedy)], variable_prefix="web_", **options)["faults"]
    assert fault["code"] == "some_code"
    return fault


@pytest.mark.parametrize(
    ("subject", "shown"),
    [
        ("host", "web_host"),
        ("api_keys[3]", "web_api_keys[3]"),
        ("files: a.gguf", "web_files: a.gguf"),
        ("hostname", "hostname"),
        ("the host", "the host"),
        ("0.0.0.0:8080", "0.0.0.0:8080"),
        ("variable_prefix", "variable_prefix"),
    ],
)
def test_a_subject_that_is_an_option_is_the_role_s_variable(subject: str, shown: str) -> None:
    assert of_role(subject)["subject"] == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Set api_keys (openssl makes one).", "Set web_api_keys (openssl makes one)."),
        ("Use api_keys, or api_key_file.", "Use web_api_keys, or web_api_key_file."),
        ("Write cache_type_v=f16.", "Write web_cache_type_v=f16."),
        ("set by `parallel`", "set by `web_parallel`"),
        # Words of the language, other names that hold one, and paths stay.
        ("a host in parallel", "a host in parallel"),
        ("old_api_keys and api_keys_old", "old_api_keys and api_keys_old"),
        ("read /etc/api_keys and api_keys.txt", "read /etc/api_keys and api_keys.txt"),
        ("already web_api_keys", "already web_api_keys"),
        ("run `parallel --jobs 2`", "run `parallel --jobs 2`"),
    ],
)
def test_a_message_names_the_role_s_variables(text: str, shown: str) -> None:
    fault = of_role("x", text, text)
    assert (fault["message"], fault["remedy"]) == (shown, shown)


def test_a_failure_and_its_list_of_faults_say_the_same() -> None:
    faults = list(plan(Settings("/m/a.gguf", host="0.0.0.0", extra_args=["-np", "2"]), Surroundings()).faults)
    results = ended(faults, variable_prefix="llama_server_", **Settings("").__dict__)
    assert results["msg"] == as_text(Fault(**fault) for fault in results["faults"])
    assert "[open_without_key] llama_server_host: " in results["msg"]
    assert "Set llama_server_api_keys (" in results["msg"]
    assert "Use `llama_server_parallel` instead." in results["msg"]


@pytest.mark.parametrize("params", [{}, {"variable_prefix": ""}, {"variable_prefix": None}])
def test_without_a_role_options_keep_their_names(params: dict[str, Any]) -> None:
    results = ended([Fault("some_code", "host", "api_keys", "")], host="::", api_keys=[], **params)
    assert results["msg"] == "[some_code] host: api_keys"


def test_a_code_means_one_thing_whichever_part_reports_it() -> None:
    shared = FaultKind("one_meaning", "warning", "A test's own kind.", "x")
    Catalogue("here", [shared])
    assert Catalogue("there", [shared]).fault("one_meaning", "x", "y", "z").code == "one_meaning"
    with pytest.raises(ValueError, match="one_meaning of elsewhere has another meaning"):
        Catalogue("elsewhere", [replace(shared, severity="critical")])


def test_an_option_that_has_a_variable_s_name_keeps_it() -> None:
    """plan_check asks about two roles; one of them gives its variables by their names."""
    fault = Fault("some_code", "web_host: X", "", "Write `web_host`, or `port`.")
    params = {"variable_prefix": "srv_", "web_host": "", "port": 1}
    with pytest.raises(Ended) as end:
        finish(Module(**params), [fault], variables=("web_host",))
    (shown,) = end.value.results["faults"]
    assert (shown["subject"], shown["remedy"]) == ("web_host: X", "Write `web_host`, or `srv_port`.")


def test_the_table_s_words_are_the_variables_of_the_roles() -> None:
    """Only where a role asks, only where something is to be written, and as the role itself says where it says so."""
    fault = Fault("some_code", "driver=590", "driver=590 is too new", "Write driver=580 or ollama=0.24.0, parallel=4.")
    options: dict[str, Any] = {"parallel": 1, "driver": ""}
    (plain,) = ended([fault], **options)["faults"]
    assert plain["remedy"] == fault.remedy
    (role,) = ended([fault], variable_prefix="srv_", **options)["faults"]
    assert role["remedy"] == "Write nvidia_driver_branch=580 or ollama_version=0.24.0, parallel=4."
    assert (role["subject"], role["message"]) == (fault.subject, fault.message)
    names = {"driver": "plan_driver", "parallel": "srv_parallel"}
    (own,) = ended([fault], variable_prefix="srv_", variable_names=names, **options)["faults"]
    assert own["remedy"] == "Write plan_driver=580 or ollama_version=0.24.0, srv_parallel=4."
