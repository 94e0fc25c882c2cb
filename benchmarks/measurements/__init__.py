"""The measurements. Each function prints lines (`harness.lines`) and returns nothing."""
