"""The language that pictures, quizzes and checks speak in this kernel: that of the lesson that is open."""

from __future__ import annotations

current = "en"  # set by course.lesson.lesson(), read wherever no language is given
