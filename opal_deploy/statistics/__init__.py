"""Figures with their uncertainty: numpy only, so that every room can use it."""
