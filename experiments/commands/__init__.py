"""The commands of `hybridscope`, by what they are about."""
