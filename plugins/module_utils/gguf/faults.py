# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What can be wrong with a model file."""

from __future__ import annotations

from ..faults import Catalogue, FaultError, FaultKind

FAULTS = Catalogue(
    "gguf",
    [
        FaultKind(
            "gguf_not_found",
            "critical",
            "There is no such model file.",
            "there is no file of that name",
        ),
        FaultKind(
            "gguf_unreadable",
            "critical",
            "The model file exists but cannot be read.",
            "Permission denied",
        ),
        FaultKind(
            "gguf_wrong_file",
            "critical",
            "The file is no GGUF but something recognisable.",
            "this is a Git LFS pointer, not the file it stands for (103 bytes instead of 28.4 GiB)",
        ),
        FaultKind(
            "gguf_version_unsupported",
            "critical",
            "The GGUF version is none that the engine reads.",
            "GGUF version 1; versions 2 and 3 are read",
        ),
        FaultKind(
            "gguf_header_invalid",
            "critical",
            "The header contradicts the format, so no engine would load the file.",
            "at byte 24: key 7 'general.name' has type 99, which does not exist",
        ),
        FaultKind(
            "gguf_truncated",
            "critical",
            "The file ends before its header or its tensor data do.",
            "the file has 1073741824 bytes, tensor blk.2.ffn_down.weight ends at byte 4294967296",
        ),
        FaultKind(
            "gguf_not_first_shard",
            "error",
            "The file is a later shard of a set; an engine must be given the first.",
            "this is shard 2 of 4",
        ),
        FaultKind(
            "gguf_shard_missing",
            "critical",
            "Shards of the set are missing.",
            "shards 3 and 4 of 4 are missing",
        ),
        FaultKind(
            "gguf_shard_mismatch",
            "critical",
            "Files lie side by side as a shard set but do not belong together.",
            "shard 2 says it is number 3 of 4",
        ),
        FaultKind(
            "gguf_foreign_byte_order",
            "warning",
            "The file is big-endian; engines on common machines load little-endian files only.",
            "the file is big-endian",
        ),
        FaultKind(
            "gguf_header_not_saved",
            "error",
            "The saved header could not be written.",
            "the header cannot be written: No such file or directory",
        ),
        FaultKind(
            "gguf_url_failed",
            "critical",
            "The header could not be fetched.",
            "HTTP status 404",
        ),
    ],
)


def gguf_error(code: str, subject: str, message: str, remedy: str) -> FaultError:
    return FaultError(FAULTS.fault(code, subject, message, remedy))
