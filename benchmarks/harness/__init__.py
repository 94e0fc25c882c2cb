"""How measurements are run, timed and reported; knows nothing of what is measured."""
