def sum(x, y): return x * y
