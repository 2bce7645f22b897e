"""From a plan to a bundle: what each operation's place is, stages built for their targets, proof before deployment."""
