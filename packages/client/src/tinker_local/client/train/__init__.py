"""Training on rows of data: what they are, how they become data of the SDK, and the loop."""
