def gap(x, y): return x + y
