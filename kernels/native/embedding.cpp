// Rows of a table, times a factor.
#include <cstdint>
#include <cstring>

#include "cpu_graph.h"
#include "vec.h"

namespace baton {

template <class T> void scale_values(void* row, int64_t bytes, float scale) {
    T* values = static_cast<T*>(row);
    for_lanes(bytes / static_cast<int64_t>(sizeof(T)), [&](int64_t i, int lanes) {
        store_upto(values + i, load_upto(values + i, lanes) * scale, lanes);
    });
}

}  // namespace baton

extern "C" {

// out[i] = table[ids[i]] * scale, rows of row_bytes; ids are int64 where `wide`, else int32. An id outside the table
// gives bytes of ones, which are NaN in every float type. dtype is only used if scale is not 1.
void baton_embedding(int dtype, const void* table, int64_t num_rows, int64_t row_bytes, const void* ids, int wide,
                     int64_t count, float scale, void* out) {
    for (int64_t i = 0; i < count; i++) {
        int64_t id = wide ? static_cast<const int64_t*>(ids)[i] : static_cast<const int32_t*>(ids)[i];
        char* to = static_cast<char*>(out) + i * row_bytes;
        if (id < 0 || id >= num_rows) {
            std::memset(to, 0xff, row_bytes);
            continue;
        }
        std::memcpy(to, static_cast<const char*>(table) + id * row_bytes, row_bytes);
        if (scale != 1.0f) BATON_DISPATCH(dtype, baton::scale_values, to, row_bytes, scale)
    }
}

}

BATON_RECORDABLE(baton_embedding)
