# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Real runs of small playbooks through ansible-runner, and what is made of them."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.unit.volta_llm.conftest import Checkout
from volta_llm import UsageError, converge
from volta_llm.cli import main

WRITE = """
- name: Write a file
  ansible.builtin.copy:
    content: "{{ text | default('x') }}"
    dest: "{{ playbook_dir }}/written"
    mode: "0600"
"""
ALWAYS = """
- name: Change for ever
  ansible.builtin.command: "true"
  changed_when: true
"""


def test_twice_is_idempotent_and_writes_both_reports(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    checkout.play("- name: Do the role\n  ansible.builtin.include_role:\n    name: writer\n")
    checkout.role("writer", WRITE)
    sub = checkout.root / "deeper"
    sub.mkdir()
    monkeypatch.chdir(sub)
    (sub / "vars.yml").write_text("text: from a file\n")

    status = main(
        ["converge", "-i", "../hosts.yml", "--twice", "--json", "out.json", "--junit", "out.xml", "-e", "@vars.yml"]
    )

    shown = capfd.readouterr().out
    assert status == 0, shown
    assert (checkout.root / "written").read_text() == "from a file"
    assert "TASK [writer : Write a file]" in shown
    assert "Time by role, run 2" in shown
    assert shown.rstrip().endswith("converged, and the second run changed nothing")
    document = json.loads((sub / "out.json").read_text())
    assert (document["version"], document["status"], document["idempotent"]) == (1, "successful", True)
    first, second = document["runs"]
    assert [host["changed"] for host in first["hosts"] + second["hosts"]] == [1, 0]
    [changed] = first["hosts"][0]["changed_tasks"]
    assert (changed["role"], changed["name"]) == ("writer", "Write a file")
    assert set(first["roles_s"]) == {"writer", "(play)"}
    suites = ElementTree.parse(sub / "out.xml").getroot().findall("testsuite")
    assert [suite.get("name") for suite in suites] == ["run 1 / Try / one", "run 2 / Try / one"]
    assert [(case.get("classname"), case.get("name")) for case in suites[0]] == [
        ("play", "Do the role"),
        ("writer", "Write a file"),
    ]
    assert {suite.get("failures") for suite in suites} == {"0"}
    left = {path.name for path in checkout.root.iterdir()}
    assert left == {"ansible.cfg", "galaxy.yml", "library", "hosts.yml", "site.yml", "roles", "deeper", "written"}


def test_not_idempotent_names_the_tasks(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    checkout.play(WRITE + ALWAYS)
    monkeypatch.chdir(checkout.root)

    status = main(["converge", "-q", "-i", "hosts.yml", "--twice", "--junit", "out.xml"])

    shown = capfd.readouterr().out
    assert status == 2
    assert "changed again: Change for ever" in shown
    assert "TASK" not in shown
    failures = ElementTree.parse("out.xml").getroot().findall("testsuite/testcase/failure")
    assert [(failure.get("type"), failure.get("message")) for failure in failures] == [
        ("not_idempotent", f"changed again in run 2: {checkout.root}/site.yml:11")
    ]


def test_progress_of_a_running_task_is_shown_before_its_result(checkout: Checkout) -> None:
    (checkout.root / "action_plugins").mkdir()
    (checkout.root / "action_plugins" / "slow.py").write_text(
        "from ansible.plugins.action import ActionBase\nfrom ansible.utils.display import Display\n\n"
        "class ActionModule(ActionBase):\n    def run(self, tmp=None, task_vars=None):\n"
        "        Display().display('step 1 of 2')\n        return {'changed': False}\n"
    )
    checkout.play("- name: Build\n  slow:\n")
    lines: list[str] = []

    converge(checkout.request(), show=lines.append)

    text = "\n".join(lines)
    assert text.index("TASK [Build]") < text.index("step 1 of 2") < text.index("ok: [one]")


def test_check_mode_changes_nothing(checkout: Checkout) -> None:
    checkout.play(WRITE)

    result = checkout.converge(check=True)

    assert (result.status, result.exit_status, result.runs[0].changed) == ("successful", 0, 1)
    assert not (checkout.root / "written").exists()


def test_failure_carries_faults_also_those_of_loop_items(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    checkout.role(
        "judge",
        "- name: Warn\n  faulty:\n    codes: [warm]\n    fail: false\n"
        "- name: Look at the cards\n  faulty:\n    codes: '{{ item }}'\n    secret: s3cret-value\n"
        "  loop: [[], [gpu_missing, nvlink_inactive]]\n"
        "- name: Never reached\n  ansible.builtin.debug:\n",
    )
    checkout.play("- name: Judge\n  ansible.builtin.import_role:\n    name: judge\n")
    monkeypatch.chdir(checkout.root)

    status = main(["converge", "-i", "hosts.yml", "--twice", "--json", "out.json", "--junit", "out.xml"])

    shown = capfd.readouterr().out
    assert status == 1
    assert "[gpu_missing] card 3: gpu_missing was found\n      -> mend it" in shown
    text = Path("out.json").read_text()
    document = json.loads(text)
    [run] = document["runs"]  # no second run after a failed one
    [host] = run["hosts"]
    assert (document["status"], run["status"], document["idempotent"]) == ("failed", "failed", None)
    assert [fault["code"] for fault in host["faults"]] == ["gpu_missing", "nvlink_inactive"]
    assert [fault["code"] for fault in host["warnings"]] == ["warm"]
    assert (host["failed_task"]["role"], host["failed_task"]["name"]) == ("judge", "Look at the cards")
    assert host["failed_task"]["message"] == "faults were found"
    [failure] = ElementTree.parse("out.xml").getroot().findall("testsuite/testcase/failure")
    assert failure.get("type") == "gpu_missing,nvlink_inactive"
    assert "[nvlink_inactive] card 3" in str(failure.text)
    junit = Path("out.xml").read_text()
    for report in (text, junit, shown):
        assert "s3cret-value" not in report
    assert "invocation" not in text + junit


def test_endpoints_are_handed_over_as_clients_call_them(checkout: Checkout) -> None:
    (checkout.root / "two.yml").write_text(
        (checkout.root / "hosts.yml")
        .read_text()
        .replace("one:", "near: {ansible_host: 127.0.0.1}\n    far: {ansible_host: 10.0.0.5}")
    )
    checkout.play("- name: Probe\n  faulty:\n    base_url: http://127.0.0.1:8080/v1\n")

    result = checkout.converge("two.yml", extra_vars=("llama_server_host=0.0.0.0",))

    far, near = result.runs[0].hosts
    assert (far.endpoints, near.endpoints) == (["http://10.0.0.5:8080/v1"], ["http://127.0.0.1:8080/v1"])
    assert [(note.code, note.subject) for note in result.notes] == [
        ("endpoint_loopback", "near http://127.0.0.1:8080/v1")
    ]
    assert result.exit_status == 0


def test_an_engine_that_stands_by_is_no_endpoint(checkout: Checkout) -> None:
    """Its settings were judged, so its address is in a result; only the other one is handed over."""
    checkout.play(
        "- name: Settle\n  faulty:\n    base_url: http://127.0.0.1:8080/v1\n"
        "- name: Hand over\n  ansible.builtin.set_fact:\n"
        "    ollama_endpoints: [{name: ollama, base_url: 'http://10.0.0.5:11434/v1', model: m}]\n"
    )

    result = checkout.converge()

    [host] = result.runs[0].hosts
    assert host.endpoints == ["http://10.0.0.5:11434/v1"]
    assert [endpoint["name"] for endpoint in host.hand_over] == ["ollama"]


def test_both_engines_are_handed_over(checkout: Checkout) -> None:
    checkout.play(
        "- name: One\n  ansible.builtin.set_fact:\n"
        "    llama_server_endpoints: [{name: llama-server, base_url: 'http://10.0.0.5:8080/v1'}]\n"
        "- name: Other\n  ansible.builtin.set_fact:\n"
        "    ollama_endpoints: [{name: ollama, base_url: 'http://10.0.0.5:11434/v1'}]\n"
    )

    [host] = checkout.converge().runs[0].hosts
    assert [endpoint["name"] for endpoint in host.hand_over] == ["llama-server", "ollama"]
    assert host.endpoints == ["http://10.0.0.5:8080/v1", "http://10.0.0.5:11434/v1"]


def test_what_clients_have_to_know_is_in_the_result_and_other_facts_are_not(checkout: Checkout) -> None:
    checkout.play(
        "- name: Hand over\n  ansible.builtin.set_fact:\n"
        "    llama_server_endpoints: [{name: llama-server, base_url: 'http://10.0.0.5:8080/v1', model: demo}]\n"
        "    other: hidden-text\n"
    )

    result = checkout.converge()

    [host] = result.runs[0].hosts
    assert host.hand_over == [{"name": "llama-server", "base_url": "http://10.0.0.5:8080/v1", "model": "demo"}]
    assert json.loads(json.dumps(result.as_dict()))["runs"][0]["hosts"][0]["hand_over"] == host.hand_over
    assert "hidden-text" not in json.dumps(result.as_dict())


def test_no_log_results_stay_censored(checkout: Checkout) -> None:
    (checkout.root / "hosts.yml").write_text(
        (checkout.root / "hosts.yml").read_text().replace("one:", "one: {texts: [hidden-text]}\n    two: {texts: []}")
    )
    checkout.play(
        "- name: Hide each\n  ansible.builtin.fail:\n    msg: '{{ item }}'\n  loop: '{{ texts }}'\n  no_log: true\n"
        "- name: Hide it\n  ansible.builtin.fail:\n    msg: hidden-text\n  no_log: true\n"
    )

    result = checkout.converge()

    tasks = [host.failed_task for host in result.runs[0].hosts]
    assert [task.name for task in tasks if task] == ["Hide each", "Hide it"]
    for task in tasks:
        assert task is not None
        assert "no_log: true" in str(task.message)
    assert "hidden-text" not in json.dumps(result.as_dict())


def test_faults_belong_to_the_task_that_fails_for_them(checkout: Checkout) -> None:
    checkout.play(
        "- name: Read\n  faulty:\n    codes: [gpu_missing, warm]\n    fail: false\n"
        "- name: Judge\n  ansible.builtin.fail:\n    msg: |-\n"
        "      [gpu_missing] card 3: gpu_missing was found\n        -> mend it\n"
    )

    result = checkout.converge()

    host = result.runs[0].hosts[0]
    assert host.failed_task is not None
    assert (host.failed_task.name, [fault.code for fault in host.failed_task.faults]) == ("Judge", ["gpu_missing"])
    assert [fault.code for fault in host.faults] == ["gpu_missing"]
    assert [fault.code for fault in host.warnings] == ["warm"]


def test_rescued_and_ignored_failures_do_not_fail_the_host(checkout: Checkout) -> None:
    checkout.play(
        "- name: Guard\n  block:\n    - name: Break\n      faulty:\n        codes: [gpu_missing]\n"
        "  rescue:\n    - name: Mend\n      ansible.builtin.debug:\n"
        "- name: Do not mind\n  ansible.builtin.command: 'false'\n  changed_when: false\n  ignore_errors: true\n"
    )

    result = checkout.converge()

    host = result.runs[0].hosts[0]
    assert (result.exit_status, host.rescued, host.ignored, host.failed_task, host.faults) == (0, 1, 1, None, [])
    assert [fault.code for fault in host.warnings] == ["gpu_missing"]


def test_reboot_required_has_a_status_of_its_own(checkout: Checkout) -> None:
    (checkout.root / "two.yml").write_text(
        (checkout.root / "hosts.yml")
        .read_text()
        .replace("one:", "one: {wants: [reboot_required]}\n    two: {wants: '{{ second }}'}")
    )
    checkout.play("- name: Gate\n  faulty:\n    codes: '{{ wants }}'\n")

    waits = checkout.converge("two.yml", extra_vars=('{"second": []}',))
    broken = checkout.converge("two.yml", extra_vars=('{"second": ["gpu_missing"]}',))

    assert (waits.status, waits.exit_status) == ("reboot_required", 4)
    assert [host.good for host in waits.runs[0].hosts] == [False, True]
    assert (broken.status, broken.exit_status) == ("failed", 1)


def test_unreachable_host(checkout: Checkout) -> None:
    # Nothing listens on port 1, and the address never leaves the machine.
    (checkout.root / "far.yml").write_text(
        "all:\n  hosts:\n    far:\n      ansible_host: 127.0.0.1\n      ansible_port: 1\n      ansible_ssh_retries: 0\n"
    )
    checkout.play("- name: Ping\n  ansible.builtin.ping:\n")

    result = checkout.converge("far.yml")

    host = result.runs[0].hosts[0]
    assert (result.status, result.exit_status, host.unreachable, host.failed) == ("failed", 1, 1, 0)
    assert host.failed_task is not None
    assert host.failed_task.status == "unreachable"
    assert "connect" in str(host.failed_task.message).lower()


def test_a_playbook_that_ansible_cannot_load_is_an_error_with_its_words(checkout: Checkout) -> None:
    checkout.play("- name: Misspelt\n  ansible.builtin.no_such_module:\n")

    result = checkout.converge()

    assert (result.status, result.exit_status) == ("error", 1)
    assert "no_such_module" in str(result.runs[0].error)


def test_no_host_run_is_no_success(checkout: Checkout) -> None:
    (checkout.root / "site.yml").write_text("- name: Elsewhere\n  hosts: others\n  tasks: []\n")

    result = checkout.converge()

    assert (result.status, result.exit_status) == ("error", 1)
    assert "no host was run (plays: Elsewhere)" in str(result.runs[0].error)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-i", "nowhere"], "inventory nowhere: no such file or folder below"),
        (["-i", "hosts.yml", "--playbook", "gone.yml"], "playbook gone.yml: no such file below"),
        (["-i", "hosts.yml", "--playbook", "library"], "playbook library is a folder"),
        (["-i", "hosts.yml", "--project", "library"], "--project library: no ansible.cfg and no galaxy.yml there"),
        (["-i", "hosts.yml", "--json", "gone/out.json"], "--json gone/out.json: the folder"),
        (["-i", "hosts.yml", "--junit", "library"], "--junit library is a folder"),
        (["-i", "hosts.yml", "-e", "@gone.yml"], "-e gone.yml: no such file"),
        (["-i", "hosts.yml", "--vault-password-file", "gone"], "--vault-password-file gone: no such file"),
        (["-i", "hosts.yml", "--check", "--twice"], "--twice proves a real run"),
        (["-i", "empty.yml"], "names no hosts"),
        (["-i", "broken.yml"], "broken.yml"),
        (["-i", "wide.yml"], "llama_server_allowed_clients comes to 0.0.0.0/0"),
        (["-i", "hosts.yml", "--no-such-option"], "unrecognized arguments: --no-such-option"),
        ([], "the following arguments are required: -i/--inventory"),
    ],
)
def test_usage_errors_say_what_is_wrong_and_run_nothing(
    checkout: Checkout,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    checkout.play(WRITE)
    (checkout.root / "empty.yml").write_text("all:\n  hosts: {}\n")
    (checkout.root / "broken.yml").write_text("all: [hosts\n")
    (checkout.root / "wide.yml").write_text(
        "all:\n  hosts:\n    one:\n      ansible_connection: local\n"
        "      llama_server_allowed_clients: [0.0.0.0/1, 128.0.0.0/1]\n"
    )
    monkeypatch.chdir(checkout.root)

    try:
        status = main(["converge", *arguments])
    except SystemExit as stopped:  # argparse's own way out
        status = int(str(stopped.code))

    assert status == 3
    assert message in capfd.readouterr().err
    assert not (checkout.root / "written").exists()


def test_a_folder_that_was_looked_in_is_named_once(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(checkout.root)
    assert main(["converge", "-i", "nowhere"]) == 3
    assert capfd.readouterr().err.count(str(checkout.root)) == 1

    inner = checkout.root / "inner"
    inner.mkdir()
    monkeypatch.chdir(inner)
    assert main(["converge", "-i", "nowhere"]) == 3
    assert f"below {inner} or {checkout.root}\n" in capfd.readouterr().err


def test_no_checkout_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)

    assert main(["converge", "-i", "hosts.yml"]) == 3
    assert "no checkout of volta.llm at or above" in capfd.readouterr().err


def test_vaulted_inventory_needs_its_password(checkout: Checkout) -> None:
    (checkout.root / "group_vars").mkdir()
    # Made with ansible-vault encrypt; the password is "right", the content "text: from the vault".
    vaulted = Path(__file__).parent.parent / "fixtures" / "volta_llm" / "vaulted.txt"
    (checkout.root / "group_vars" / "all.yml").write_text(vaulted.read_text())
    (checkout.root / "password").write_text("right\n")
    checkout.play(WRITE)

    with pytest.raises(UsageError, match=r"(?i)vault"):
        checkout.converge()
    result = checkout.converge(vault=(f"--vault-password-file={checkout.root / 'password'}",))

    assert result.exit_status == 0
    assert (checkout.root / "written").read_text() == "from the vault"
    assert "from the vault" not in json.dumps(result.as_dict())
