"""A sequence as far as it is: whoever goes on with it needs to know no more."""

from __future__ import annotations

import msgspec

from baton.engine.core.messages import EngineOutput, EngineRequest

from ..routing.router import RoutingQuery, num_tokens


class Progress:
    """Of one sequence, in whichever engines. Each attempt has a generation: words of older ones are dropped."""

    def __init__(self, request: EngineRequest, wanted: RoutingQuery) -> None:
        """`wanted`: what the router has read of the request."""
        self.generation = request.generation
        self._request = request
        self._wanted = wanted
        self._tokens = list(request.output_token_ids)

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def num_tokens(self) -> int:
        """Of the answer."""
        return len(self._tokens)

    @property
    def newest_token(self) -> int:
        return self._tokens[-1]

    def request(self) -> EngineRequest:
        """With all tokens so far."""
        tokens = list(self._tokens)
        return msgspec.structs.replace(self._request, output_token_ids=tokens, generation=self.generation)

    def wanted(self, request: EngineRequest) -> RoutingQuery:
        """By `request`, which is this sequence as of now."""
        return self._wanted.with_tokens(num_tokens(request))

    def take(self, output: EngineOutput) -> EngineOutput:
        """Keeps what another engine would need. Returns what of it is news to the client."""
        if self._tokens and output.num_cached_tokens:  # what this engine found or received is none
            output = msgspec.structs.replace(output, num_cached_tokens=0)
        self._tokens += output.token_ids
        if output.prompt_logprobs is not None:  # once is enough
            sampling = msgspec.structs.replace(self._request.sampling, prompt_logprobs=None)
            self._request = msgspec.structs.replace(self._request, sampling=sampling)
        return output
