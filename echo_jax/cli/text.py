"""Shows text as it comes: the end of a prompt, dimly, and then its continuation.

Knows tokens that arrive one by one and a terminal. One prompt streams; of several, each is shown when it is done.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from echo_jax.checkpoints.tokenizer import Tokenizer
from echo_jax.cli.models import Prompt
from echo_jax.cli.output import Bar

TAIL_TOKENS, TAIL_CHARACTERS, TAIL_LINES = 800, 240, 4
DIM, NORMAL = "\x1b[2m", "\x1b[0m"


class Printer:
    """Collects the tokens of every prompt and shows them; with is_silent it only collects."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        tokenizer: Tokenizer,
        max_new_tokens: int,
        stop_tokens: Sequence[int],
        is_silent: bool,
    ):
        self.prompts, self.tokenizer, self.stop_tokens = prompts, tokenizer, frozenset(stop_tokens)
        self.max_new_tokens, self.is_silent = max_new_tokens, is_silent
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self._streams = tokenizer.stream()
        self._is_mid_line = False

    def add(self, prompt: int, token: int, bar: Bar) -> None:
        """One more token of a prompt."""
        tokens = self.tokens[prompt]
        tokens.append(token)
        is_last = token in self.stop_tokens or len(tokens) == self.max_new_tokens
        if self.is_silent:
            return
        if len(self.prompts) == 1:
            if len(tokens) == 1:
                bar.stop()
                self._show_tail(prompt)
            self._say(
                ("" if token in self.stop_tokens else self._streams.push(token))
                + (self._streams.end() if is_last else "")
            )
            if is_last:
                self._end_line()
        elif is_last:
            with bar.paused():
                self._show_whole(prompt)

    def interrupted(self) -> None:
        """Ends the line that was being written, and shows what the unfinished ones of several prompts have so far."""
        if self.is_silent:
            return
        self._end_line()
        if len(self.prompts) > 1:
            for prompt, tokens in enumerate(self.tokens):
                if tokens and tokens[-1] not in self.stop_tokens and len(tokens) < self.max_new_tokens:
                    self._show_whole(prompt)

    def text(self, prompt: int) -> str:
        """The continuation without its end token."""
        tokens = self.tokens[prompt]
        return self.tokenizer.decode(tokens[:-1] if tokens and tokens[-1] in self.stop_tokens else tokens)

    def rows(self, is_complete: bool = True) -> Iterator[dict[str, Any]]:
        """One row a prompt."""
        for number, prompt in enumerate(self.prompts):
            yield {
                "row": "text",
                "prompt": number,
                "file": str(prompt.path),
                "prompt_tokens": len(prompt.tokens),
                "tokens": self.tokens[number],
                "text": self.text(number),
                "complete": is_complete,
            }

    # ---- the terminal ----------------------------------------------------------------------------------------

    def _show_whole(self, prompt: int) -> None:
        label = self.prompts[prompt]
        self._say(f"--- {label.path}: {len(label.tokens):,} tokens and {len(self.tokens[prompt]):,} new\n")
        self._show_tail(prompt)
        self._say(self.text(prompt))
        self._end_line()

    def _show_tail(self, prompt: int) -> None:
        """The reader sees where the prompt ends: it is dim on a terminal and in brackets elsewhere."""
        tail = self.tokenizer.decode(self.prompts[prompt].tokens[-TAIL_TOKENS:])
        tail = "\n".join(tail[-TAIL_CHARACTERS:].split("\n")[-TAIL_LINES:])
        if len(self.prompts[prompt].tokens) > len(self.tokenizer.encode(tail, add_special_tokens=False)):
            tail = f"...{tail}"
        if sys.stdout.isatty():
            sys.stdout.write(DIM)
            self._say(tail)
            sys.stdout.write(NORMAL)
        else:
            self._say(f"[{tail}]")

    def _say(self, text: str) -> None:
        """What the terminal cannot show is replaced: a model may say anything, control sequences included."""
        if not text:
            return
        if sys.stdout.isatty():
            text = "".join(one if one.isprintable() or one in "\n\t" else "\ufffd" for one in text)
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
        sys.stdout.flush()
        self._is_mid_line = not text.endswith("\n")

    def _end_line(self) -> None:
        if self._is_mid_line:
            self._say("\n")
