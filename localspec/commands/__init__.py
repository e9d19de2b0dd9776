"""The commands of `localspec`, one file each. They import what is heavy when they run, not before."""
