"""What an answer's text is: thoughts, words and calls of functions, in the forms that models write.

reading ──> thoughts, a form's reader ──> parts
forms    which form a chat template teaches: marked_calls (call_reader), tagged_calls (tagged_reader), pythonic, harmony
calls, written_calls   what forms have in common
turns    calls of earlier turns, as templates take them
marks, nesting, stepping, among_words, values   what readers are made of
"""
