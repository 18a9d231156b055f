# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The demo's model: a small GGUF of the architecture ``qwen4exp``, with random weights and the real vocabulary.

It proves that the pinned engine loads and serves the architecture of the reference machine's model: hyper-connections,
gated delta net layers with full attention in every fourth, the sparse-attention indexer, experts with a shared one,
and the n-gram table. What it says means nothing: words in random order.
"""

from .generate import generate
from .source import SourceError, vocabulary_file

__all__ = ["SourceError", "generate", "vocabulary_file"]
