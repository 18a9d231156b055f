# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What `make demo` ends with: the card of the run, below the recap."""

from __future__ import annotations

import sys

from tests.demo import hand_over_card, how_to_ask, shown

OUTPUT = """\
TASK [volta.llm.llama_server : Prove that the endpoint answers, with the context asked for] ***
ok: [demo-1] => (item=llama-server)

TASK [volta.llm.llama_server : Hand over the endpoint] *************************
ok: [demo-1] =>
    msg: |-
        llama-server serves
          base URL  http://10.213.49.11:8080/v1

        Dify: Model provider
          Model type, name  LLM, volta-demo

PLAY RECAP *********************************************************************
demo-1                     : ok=20   changed=0
""".splitlines()


def test_the_card_is_found_and_set_to_the_left() -> None:
    assert hand_over_card(OUTPUT).splitlines() == [
        "llama-server serves",
        "  base URL  http://10.213.49.11:8080/v1",
        "",
        "Dify: Model provider",
        "  Model type, name  LLM, volta-demo",
    ]
    assert "export OPENAI_API_KEY=demo-key" in how_to_ask(OUTPUT)


def test_a_run_without_a_card_has_none() -> None:
    assert hand_over_card(OUTPUT[:2]) == ""


def test_output_is_kept_without_colours_and_the_status_with_it() -> None:
    program = "print('\\x1b[0;32mok: [demo-1]\\x1b[0m'); raise SystemExit(3)"
    assert shown([sys.executable, "-c", program]) == (3, ["ok: [demo-1]"])
