"""The training side of the controller: batches, their cells, steps, bursts and what happens between them."""
