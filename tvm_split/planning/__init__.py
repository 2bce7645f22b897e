"""Plan a model on a cluster: measure, build the problem, solve it, choose, and say why."""
