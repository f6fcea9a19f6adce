"""What tests share: drivers, oracles and calls of the command line; tests themselves are beside this folder."""
