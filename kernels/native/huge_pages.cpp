// Huge pages for memory that the kernel library allocates.
#include <cstdint>
#if defined(__linux__)
#include <sys/mman.h>
#endif

extern "C" {

// Asks for huge pages under [address, address + bytes), both multiples of 2 MiB. It is a hint: the
// system may refuse.
void baton_advise_huge_pages(void* address, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    madvise(address, static_cast<size_t>(bytes), MADV_HUGEPAGE);
#else
    (void)address, (void)bytes;
#endif
}

}
