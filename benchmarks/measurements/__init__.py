"""What is measured. Each function prints lines (`harness.lines`) and returns nothing."""
