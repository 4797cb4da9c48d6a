// Replays the calls of a CPU graph, one after another: see cpu_graph.py.
#include <cstdint>

extern "C" {

struct BatonCall {
    void (*function)(const uint64_t* words);
    const uint64_t* words;
};

void baton_replay(const BatonCall* calls, int64_t count) {
    for (int64_t i = 0; i < count; i++) calls[i].function(calls[i].words);
}

}
