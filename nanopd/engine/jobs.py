"""Job: one user's request inside the engine, with the text of its samples and where its outputs go."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nanopd.engine.detokenizer import Detokenizer, Tokenizer
from nanopd.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanopd.engine.request import FinishReason, Request

OutputCallback = Callable[[RequestOutput], None]


class Job:
    """The n sequences of one request, from add to the last one's end.

    Text is decoded as tokens come only if somebody looks at it meanwhile: a stop string or a stream. Otherwise it is
    decoded once at the end, since decoding 256 requests' tokens one by one would take longer than a step should.
    """

    def __init__(
        self,
        prompt: str | None,
        sequences: Sequence[Request],
        tokenizer: Tokenizer | None,
        *,
        stream: bool,
        on_output: OutputCallback | None,
    ) -> None:
        self.request_id = sequences[0].parent_id
        self.prompt = prompt
        self.sequences = list(sequences)
        self.stream = stream
        self.on_output = on_output
        self.error: Exception | None = None  # what the tokenizer raised
        self._open = len(self.sequences)
        self._tokenizer = tokenizer
        self._texts: list[Detokenizer | None] = [None] * len(self.sequences)
        stop = sequences[0].params.stop
        assert isinstance(stop, tuple)
        if tokenizer is not None and (stream or stop):
            self._texts = [Detokenizer(tokenizer, stop) for _ in sequences]

    @property
    def watched(self) -> bool:
        """Whether each step's tokens must be decoded."""
        return self._texts[0] is not None

    @property
    def done(self) -> bool:
        return self._open == 0

    def close_one(self) -> None:
        """One more of the sequences has finished."""
        self._open -= 1

    def advance(self, request: Request) -> FinishReason | None:
        """Decode the tokens that ``request`` got since the last call. Returns why its text ends it, if it does.

        STOP: a stop string is complete. FAILED: the tokenizer raised; see ``error``.
        """
        text = self._texts[request.sample_index]
        if text is None:
            return None
        try:
            stopped = False
            for token in request.output_token_ids[text.num_tokens : _num_text_tokens(request)]:
                stopped = stopped or text.append(token)
            return FinishReason.STOP if stopped else None
        except Exception as error:  # one request's text must not take the whole step down
            self.error = error
            return FinishReason.FAILED

    def output(self) -> RequestOutput:
        """A snapshot for the client."""
        samples = [
            CompletionOutput(r.sample_index, self._text(r), list(r.output_token_ids), r.finish_reason)
            for r in self.sequences
        ]
        errors = [request.error for request in self.sequences if request.error is not None]
        return RequestOutput(
            self.request_id,
            self.prompt,
            list(self.sequences[0].prompt_token_ids),
            samples,
            finished=self.done,
            metrics=RequestMetrics.of(self.sequences) if self.done else None,
            error=errors[0] if errors else self.error,
        )

    def _text(self, request: Request) -> str:
        text = self._texts[request.sample_index]
        try:
            if text is not None:
                if request.is_finished:
                    text.finish()  # an aborted request was not finished before; twice does no harm
                return text.text
            if self._tokenizer is None or not request.is_finished:
                return ""
            return self._tokenizer.decode(request.output_token_ids[: _num_text_tokens(request)])
        except Exception as error:
            self.error = error
            return "" if text is None else text.text


def _num_text_tokens(request: Request) -> int:
    """How many of the output tokens are text: a token that stopped the request is not."""
    tokens = request.output_token_ids
    stopped = request.finish_reason is FinishReason.STOP and tokens and tokens[-1] in request.stop_ids
    return len(tokens) - 1 if stopped else len(tokens)
