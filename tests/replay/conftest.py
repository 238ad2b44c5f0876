from proxy_fixtures import proxy_tokenizer

__all__ = ["proxy_tokenizer"]
