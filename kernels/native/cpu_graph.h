// Lets a CPU graph hold calls of a function: a variant that takes the arguments as words of 64 bits, in order.
//
//     BATON_RECORDABLE(baton_rms_norm)        also exports baton_rms_norm_of_words(const uint64_t*)
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>

namespace baton {

template <class T> inline T of_word(uint64_t word) {
    static_assert(sizeof(T) <= sizeof word, "an argument is a word at most");
    T value;
    std::memcpy(&value, &word, sizeof value);  // the low bytes: machines are little-endian
    return value;
}

template <class... A, size_t... I>
inline void call_of_words(void (*function)(A...), const uint64_t* words, std::index_sequence<I...>) {
    function(of_word<A>(words[I])...);
}

template <class... A> inline void call_of_words(void (*function)(A...), const uint64_t* words) {
    call_of_words(function, words, std::index_sequence_for<A...>{});
}

}  // namespace baton

#define BATON_RECORDABLE(name) \
    extern "C" void name##_of_words(const uint64_t* words) { baton::call_of_words(name, words); }
