"""Editing models: taking slots out, and what that changes.

The answer of a model is a sum over slots, so the effect of taking some out follows from the scores alone, before
anything runs (`scores`). `suggestions` finds slots that look at the wrong thing, `api` writes the edited model, and
`page` shows both.
"""
