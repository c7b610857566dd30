"""Which configurations may run, each rule with its reason."""
