"""What a plan is expected to take: fits of what workers measured, and a pure function over them."""
