"""Engines that decode nothing but random tokens, at a set speed."""
