//! Shared parts of the end-to-end tests: homes, coordinators, proxies.
