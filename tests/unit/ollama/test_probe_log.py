# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What is read from the log of Ollama's service, and what is never repeated of it."""

from __future__ import annotations

from collections.abc import Sequence

from ansible_collections.volta.llm.plugins.module_utils.machine import Completed
from ansible_collections.volta.llm.plugins.module_utils.ollama.service_log import Said, judge_lines, read_log

STAMP = "time=2026-11-30T15:40:23.233+01:00 level="
SKIPPED = (
    STAMP + 'INFO source=llama_server.go:299 msg="skipping CUDA device — compute capability not in compiled '
    'architectures" device="NVIDIA A10" cc=860 archs="[750 890 1000 1200]" libDirs="[/usr/lib/ollama]"'
)
OLD = (
    STAMP + 'WARN source=cuda_compat.go:62 msg="NVIDIA driver too old" device="Tesla V100-SXM2-32GB" compute=7.0 '
    'driver=535 required_driver="550 or newer"'
)
CPU = STAMP + 'INFO source=types.go:60 msg="inference compute" id=cpu library=cpu compute="" name=cpu description=cpu'
CUDA = STAMP + 'INFO source=types.go:42 msg="inference compute" id=GPU-1 filter_id="" library=CUDA compute=7.0'
PROMPT = (
    STAMP
    + 'DEBUG source=routes.go:2500 msg="chat request" images=0 prompt="What does \\"msg=\\"skipping CUDA device\\"'
    ' mean? My password is hunter2"'
)
TRACE = STAMP + 'TRACE source=runner.go:174 msg="supported GPU library combinations before filtering" supported=map[]'


def test_lines_are_read_with_their_fields() -> None:
    said = judge_lines("\n".join(["Couldn't find a key", SKIPPED, SKIPPED, OLD, CPU, TRACE]))
    assert said.skipped == (
        "skipping CUDA device — compute capability not in compiled architectures "
        "(device NVIDIA A10, cc 860, archs [750 890 1000 1200], libDirs [/usr/lib/ollama])",
    )
    assert said.too_old == (
        "NVIDIA driver too old (device Tesla V100-SXM2-32GB, compute 7.0, driver 535, required_driver 550 or newer)",
    )
    assert said.no_gpu == (
        "inference compute (library cpu)",
        "supported GPU library combinations before filtering (supported map[])",
    )


def test_a_service_that_found_a_card_is_not_without() -> None:
    assert judge_lines(f"{TRACE}\n{CUDA}") == Said()


def test_a_prompt_in_the_log_is_neither_taken_for_a_line_nor_repeated() -> None:
    assert judge_lines(PROMPT) == Said()
    assert judge_lines(f"[GIN] 2026/11/30 | 200 | POST /api/chat\nmsg=x {SKIPPED}") == Said()
    broken = SKIPPED + ' prompt="My password is hunter2"'
    assert "hunter2" not in repr(judge_lines(broken))


def test_settings_without_effect() -> None:
    text = "\n".join(
        [
            STAMP + 'WARN source=config.go:285 msg="invalid environment variable, using default" '
            "key=OLLAMA_NUM_PARALLEL value=two default=1",
            STAMP + 'WARN source=server.go:245 msg="unsupported OLLAMA_KV_CACHE_TYPE" type=q5_1',
            STAMP + 'WARN source=server.go:169 msg="requested context size too large for model" num_ctx=9',
        ]
    )
    assert judge_lines(text).ignored == (
        "invalid environment variable, using default (key OLLAMA_NUM_PARALLEL, value two, default 1)",
        "unsupported OLLAMA_KV_CACHE_TYPE (type q5_1)",
    )


class Journal:
    """systemctl and journalctl; ``search`` is whether journalctl can."""

    def __init__(self, text: str, run_id: str = "abc", search: bool = True) -> None:
        self.text, self.run_id, self.search = text, run_id, search
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, argv: Sequence[str], timeout: float) -> Completed:
        self.asked.append(tuple(argv))
        if argv[0] == "systemctl":
            return Completed(tuple(argv), 0, f"InvocationID={self.run_id}\n")
        if not self.search and any(word.startswith("--grep") for word in argv):
            return Completed(tuple(argv), 1, stderr="Compiled without pattern matching support")
        return Completed(tuple(argv), 0, self.text)


def test_only_the_present_run_of_the_unit_is_read() -> None:
    journal = Journal(OLD)
    assert read_log("ollama", journal).too_old
    assert journal.asked[0][2] == "ollama.service"
    assert "_SYSTEMD_INVOCATION_ID=abc" in journal.asked[1]


def test_a_journalctl_that_cannot_search_is_read_whole() -> None:
    journal = Journal(f"{CUDA}\n{SKIPPED}", search=False)
    assert read_log("ollama.service", journal).skipped
    assert len(journal.asked) == 3


def test_a_unit_that_does_not_run_has_said_nothing() -> None:
    journal = Journal(OLD, run_id="")
    assert read_log("ollama", journal) == Said()
    assert len(journal.asked) == 1


def test_the_search_lets_every_line_through_that_is_judged() -> None:
    import re

    from ansible_collections.volta.llm.plugins.module_utils.ollama import service_log

    for line in (SKIPPED, OLD, CPU, CUDA, TRACE, *(f'msg="{message}"' for message in service_log._IGNORED)):
        assert re.search(service_log._SEARCH, line), line
    assert not re.search(service_log._SEARCH, PROMPT.replace("skipping", "x"))
