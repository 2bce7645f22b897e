"""Place pieces on machines: problems, their evaluation, search and prediction. Names and numbers only, no TVM."""
