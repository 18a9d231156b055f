# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The faults of a server that answers, and is not what was asked for."""

from __future__ import annotations

from ..faults import Catalogue, FaultKind

CATALOGUE = Catalogue(
    "serving, as measured",
    [
        FaultKind(
            "check_failed",
            "critical",
            "A check of the verification broke, so that what it looks at is not known.",
            "verification: MODULE FAILURE",
        ),
        FaultKind(
            "nothing_served",
            "critical",
            "The machine has no unit of the server.",
            "llama-server.service: there is no such unit on this machine, and no instance of it",
        ),
        FaultKind(
            "service_not_enabled",
            "warning",
            "The server would not be started at boot.",
            "llama-server.service: it would not come back after a boot",
        ),
        FaultKind(
            "unit_changed",
            "warning",
            "The unit's file was changed since systemd read it.",
            "llama-server.service: its file was changed since systemd read it; the server runs with the former one",
        ),
        FaultKind(
            "endpoint_stalled",
            "critical",
            "The server says that it is ready, computes nothing, and does not answer the test question in time, twice.",
            "http://127.0.0.1:8080: says it is ready, is idle; asked twice, no answer within 120 s",
        ),
        FaultKind(
            "endpoint_busy",
            "warning",
            "Every slot of the server works on other requests, so that the test question was not answered in time.",
            "http://127.0.0.1:8080: 2 of 2 slots at work, 5 requests wait; no answer within 120 s",
        ),
        FaultKind(
            "option_ignored",
            "error",
            "The server says at its start that an option it was given has no effect.",
            "llama-server.service: no usable GPU found, --gpu-layers option will be ignored",
        ),
        FaultKind(
            "gpu_memory_missing",
            "critical",
            "The server holds less than half of what was counted for a GPU: part of the model lies elsewhere.",
            "0000:1c:00.0: 529 MiB held, 20112 counted",
        ),
        FaultKind(
            "gpu_memory_deviates",
            "warning",
            "The server holds clearly more or less memory of a GPU than was counted before its start.",
            "0000:1a:00.0: 21300 MiB held, 20112 counted (+1188)",
        ),
        FaultKind(
            "calibration_not_kept",
            "warning",
            "What was measured of a server's memory could not be written down for the next plan.",
            "/var/lib/volta-llm/calibration.json: Read-only file system",
        ),
    ],
)
