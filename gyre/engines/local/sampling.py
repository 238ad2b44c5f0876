"""Draws the next token of every request and reports the log-probability it had.

`torch.multinomial` draws one random number per vocabulary entry, which costs more than the output layer of a small
model. Here one number per request is looked up in the cumulative distribution, summed in double precision so that rare
tokens keep their probability.
"""

import torch


class Sampler:
    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)

    def draw(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores [requests, vocabulary] of the tempered distribution; returns ids and fp32 log-probs, [requests]."""
        logprobs = torch.log_softmax(scores, dim=-1)
        cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
        total = cumulative[:, -1:]
        uniform = torch.rand(total.shape, dtype=torch.float64, generator=self._random)
        # Below the total even after rounding, so the first entry above it is a token with positive probability.
        point = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
        tokens = torch.searchsorted(cumulative, point, right=True)
        return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]

    def draw_into(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """`ModelRunner._sample`: scores [1, requests, vocabulary]; row 0 of output_ids gets ids, row 1 the bits of the
        log-probs (the library keeps both in one int32 tensor)."""
        tokens, logprobs = self.draw(scores[0])
        output_ids[0, : len(tokens)].copy_(tokens)
        output_ids[1, : len(tokens)].copy_(logprobs.view(torch.int32))
