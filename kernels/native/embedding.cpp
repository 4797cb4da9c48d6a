// Rows of a table.
#include <cstdint>
#include <cstring>

#include "cpu_graph.h"

extern "C" {

// out[i] = table[ids[i]], rows of row_bytes; ids are int64 where `wide`, else int32. An id outside the table gives bytes
// of ones, which no type of float takes for a number.
void baton_embedding(const void* table, int64_t num_rows, int64_t row_bytes, const void* ids, int wide, int64_t count,
                     void* out) {
    for (int64_t i = 0; i < count; i++) {
        int64_t id = wide ? static_cast<const int64_t*>(ids)[i] : static_cast<const int32_t*>(ids)[i];
        char* to = static_cast<char*>(out) + i * row_bytes;
        if (id < 0 || id >= num_rows) std::memset(to, 0xff, row_bytes);
        else std::memcpy(to, static_cast<const char*>(table) + id * row_bytes, row_bytes);
    }
}

}

BATON_RECORDABLE(baton_embedding)
