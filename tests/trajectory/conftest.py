from trajectory_fixtures import renderer, thinking_renderer, tokenizer

__all__ = ["renderer", "thinking_renderer", "tokenizer"]
