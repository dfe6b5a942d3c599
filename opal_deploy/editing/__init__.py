"""Editing models: taking slots out, and what that changes.

A model's answer is a sum over slots, so the effect of taking some out follows from the scores, without running the
model (`scores`). `suggestions` finds slots that look at the wrong thing, `api` writes the edited model, and `page`
shows both.
"""
