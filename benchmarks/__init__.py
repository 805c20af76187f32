"""Speed as ratios within one run; never a test. `make bench` runs all of them."""
