// Head norm, rotation and KV write of one layer's new tokens, in one pass over q, k and v.
#include <cmath>

#include "cpu_graph.h"
#include "vec.h"

namespace baton {

constexpr int MAX_HEAD_DIM = 512;

struct RopeBatch {
    int64_t tokens, q_heads, kv_heads, head_dim, value_dim;
    int64_t rotary_dim, turning, block_size;                         // turning: number of rotated pairs
    int64_t q_stride, k_stride, v_stride;                            // elements from token to token
    int64_t block_stride, head_stride, token_stride, to_value;       // elements in kv: block, KV head, token, from K to V
    const float* cos_sin;                                            // [max_positions][2 * turning]
    const int64_t *positions, *slots;
    float eps;
};

// Normalizes (if there is a norm) and rotates one head in place.
template <class T, class W> void turn_head(T* head, const W* norm, const float* cosines, const RopeBatch& batch) {
    float values[MAX_HEAD_DIM];
    int64_t dim = batch.head_dim, half = batch.rotary_dim / 2, turning = batch.turning;
    f32x16 squares = {};
    for_lanes(dim, [&](int64_t i, int lanes) {
        f32x16 v = load_upto(head + i, lanes);
        squares += v * v;
        store_upto(values + i, v, lanes);
    });
    if (norm != nullptr) {
        f32x16 scale = splat(1.0f / std::sqrt(sum(squares) / dim + batch.eps));
        for_lanes(dim, [&](int64_t i, int lanes) {
            store_upto(values + i, load_upto(values + i, lanes) * scale * load_upto(norm + i, lanes), lanes);
        });
    }
    const float* sines = cosines + turning;
    for_lanes(turning, [&](int64_t i, int lanes) {
        f32x16 first = load_upto(values + i, lanes), second = load_upto(values + half + i, lanes);
        f32x16 cosine = load_upto(cosines + i, lanes), sine = load_upto(sines + i, lanes);
        store_upto(head + i, first * cosine - second * sine, lanes);
        store_upto(head + half + i, second * cosine + first * sine, lanes);
    });
    auto keep = [&](int64_t from, int64_t to) {
        for_lanes(to - from, [&](int64_t i, int lanes) {
            store_upto(head + from + i, load_upto(values + from + i, lanes), lanes);
        });
    };
    keep(turning, half);
    keep(half + turning, dim);
}

template <class T, class W>
void rope_and_cache_by(void* q, void* k, const void* v, const void* q_norm, const void* k_norm, void* kv_layer,
                       const RopeBatch& batch, int threads) {
    bool parallel = batch.tokens * (batch.q_heads + batch.kv_heads) >= 1024;  // below that, waking threads takes longer
    int64_t key_bytes = batch.head_dim * sizeof(T), value_bytes = batch.value_dim * sizeof(T);
#pragma omp parallel for num_threads(threads) if (parallel)
    for (int64_t t = 0; t < batch.tokens; t++) {
        const float* cosines = batch.cos_sin + batch.positions[t] * 2 * batch.turning;
        T* q_token = static_cast<T*>(q) + t * batch.q_stride;
        for (int64_t h = 0; h < batch.q_heads; h++)
            turn_head(q_token + h * batch.head_dim, static_cast<const W*>(q_norm), cosines, batch);

        if (batch.slots[t] < 0) continue;  // padding: not written
        int64_t block = batch.slots[t] / batch.block_size, offset = batch.slots[t] % batch.block_size;
        T* page = static_cast<T*>(kv_layer) + block * batch.block_stride + offset * batch.token_stride;
        for (int64_t h = 0; h < batch.kv_heads; h++, page += batch.head_stride) {
            T* k_head = static_cast<T*>(k) + t * batch.k_stride + h * batch.head_dim;
            turn_head(k_head, static_cast<const W*>(k_norm), cosines, batch);
            std::memcpy(page, k_head, key_bytes);
            std::memcpy(page + batch.to_value, static_cast<const T*>(v) + t * batch.v_stride + h * batch.value_dim,
                        value_bytes);
        }
    }
}

template <class T>
void rope_and_cache(int norm_dtype, void* q, void* k, const void* v, const void* q_norm, const void* k_norm,
                    void* kv_layer, const RopeBatch& batch, int threads) {
    auto run = static_cast<DType>(norm_dtype) == DType::F32 ? rope_and_cache_by<T, float> : rope_and_cache_by<T, T>;
    run(q, k, v, q_norm, k_norm, kv_layer, batch, threads);
}

}  // namespace baton

extern "C" {

// Norms are float32 or of the type of all others. sizes: the integers of RopeBatch in its order. kv_layer points at the layer in block 0 and head 0. Norms may be null.
void baton_rope_and_cache(int dtype, int norm_dtype, void* q, void* k, const void* v, const void* q_norm,
                          const void* k_norm, void* kv_layer, const int64_t* sizes, const float* cos_sin, const int64_t* positions,
                          const int64_t* slots, float eps, int threads) {
    baton::RopeBatch batch{sizes[0], sizes[1], sizes[2],  sizes[3],  sizes[4],  sizes[5],  sizes[6], sizes[7],  sizes[8],
                           sizes[9], sizes[10], sizes[11], sizes[12], sizes[13], sizes[14], cos_sin, positions, slots, eps};
    BATON_DISPATCH(dtype, baton::rope_and_cache, norm_dtype, q, k, v, q_norm, k_norm, kv_layer, batch, threads)
}

}

BATON_RECORDABLE(baton_rope_and_cache)
