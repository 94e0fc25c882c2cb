"""Runs, times and reports measurements, whatever they measure."""
