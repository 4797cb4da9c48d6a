"""Routers compared on the same requests, in virtual time: real routers, real schedulers, no device."""
