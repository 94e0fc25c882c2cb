"""`tinker-local report`: how right and how fast a base model is on this machine, as a page that can be sent."""
