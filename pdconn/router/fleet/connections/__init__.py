"""HTTP/1.1 connections of the router to its engines."""
