# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The faults a download can report."""

from __future__ import annotations

from ..faults import DISK_FULL, SOURCE_UNREACHABLE, Catalogue, FaultKind

CATALOGUE = Catalogue(
    "transfer",
    [
        FaultKind(
            "bad_argument",
            "critical",
            "An option has a value that cannot work; nothing was done.",
            "sha256 has 63 characters, a SHA-256 has 64 hexadecimal digits",
        ),
        DISK_FULL,
        FaultKind(
            "dest_not_writable",
            "critical",
            "The destination folder cannot be written, or the file cannot be put there.",
            "cannot write to /srv/models: Permission denied",
        ),
        FaultKind(
            "source_unauthorized",
            "critical",
            "The source wants a login (401), or its licence accepted (403): a gated or private repository, or a wrong "
            "token. No other source is tried.",
            "https://huggingface.co/org/repo answers 401 Unauthorized",
        ),
        FaultKind(
            "hash_mismatch",
            "error",
            "The bytes are not those the SHA-256 stands for. They never got the file's name.",
            "SHA-256 is 9f86..., expected e3b0...",
        ),
        FaultKind(
            "size_mismatch",
            "error",
            "The source's file has another size than expected.",
            "the source has 1024 bytes, expected 2048",
        ),
        FaultKind(
            "not_the_file",
            "error",
            "The source sent something else under the file's address: a web page, an error in JSON, another format.",
            "the source sent an HTML page instead of the file",
        ),
        FaultKind(
            "lfs_pointer",
            "error",
            "The source sent the Git-LFS pointer instead of the file it stands for.",
            "the source sent a Git-LFS pointer (the file itself has 4096 bytes, SHA-256 9f86...)",
        ),
        FaultKind(
            "empty_file",
            "error",
            "The source sent no bytes at all (SHA-256 e3b0c442...).",
            "the source sent 0 bytes",
        ),
        FaultKind(
            "source_missing",
            "error",
            "The source has no such file (404, 410), or the local file is not there.",
            "https://example.org/a.gguf answers 404 Not Found",
        ),
        FaultKind(
            "source_refused",
            "error",
            "The source, or the content server behind it, refuses again and again (403).",
            "cdn.example.org refuses the link that example.org signed (403 Forbidden, 3 times)",
        ),
        SOURCE_UNREACHABLE,
        FaultKind(
            "source_misbehaves",
            "error",
            "The source breaks the protocol in a way that could corrupt the file.",
            "206 answer with Content-Range for another offset",
        ),
        FaultKind(
            "source_changed",
            "error",
            "The file changed at the source while it was being fetched, more than once.",
            'ETag changed from "a" to "b"',
        ),
        FaultKind(
            "checksum_missing",
            "critical",
            "The checksum file cannot be read or has no SHA-256 for a file; nothing was fetched.",
            "no SHA-256 for model.gguf",
        ),
        FaultKind(
            "file_corrupt",
            "error",
            "A file that was verified has other bytes now, and fetching it again is not allowed.",
            "/srv/models/a.gguf: SHA-256 is 9f86..., it was e3b0... when it was verified",
        ),
        FaultKind(
            "lock_invalid",
            "critical",
            "The lock file of a model is not what the playbook writes.",
            "files[2] has no name",
        ),
        FaultKind(
            "lock_mismatch",
            "critical",
            "What is asked for is not what the lock file says; nothing was fetched.",
            "model.gguf: the lock has SHA-256 9f86..., asked for is e3b0...",
        ),
        FaultKind(
            "not_locked",
            "critical",
            "Neither settings nor lock file have a SHA-256 for a file, and files that nothing proves are not allowed.",
            "no SHA-256 for model.gguf",
        ),
        FaultKind(
            "file_missing",
            "error",
            "The file is not there and no source is given.",
            "/srv/models/a.gguf is missing",
        ),
        FaultKind(
            "unverified",
            "warning",
            "No SHA-256 is known for the file: only its size, or nothing, was checked.",
            "no SHA-256 given: only the size was checked",
        ),
        FaultKind(
            "pull_unfinished",
            "warning",
            "Unfinished pulls have left partial blobs in Ollama's store. They are no models, and left alone.",
            "/var/lib/ollama/models/blobs: 3 partial blobs of unfinished pulls take 41.3 GB",
        ),
        FaultKind(
            "slow_storage",
            "warning",
            "The files lie on a rotating disk or a network file system: loading the model takes long.",
            "/srv/models lies on a rotating disk (/dev/sda); it reads 160 MB/s, so 111 GB take about 12 min to load",
        ),
    ],
)

fault = CATALOGUE.fault
