"""The ops: each has a plain torch reference (its meaning) and fast forms under the same name."""
