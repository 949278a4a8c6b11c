// What torch asks of a CUDA device before it lets autograd see one: a guard that guards nothing, on one device with one stream.
//
// A torch built without CUDA aborts when a tensor that says it is on a GPU needs a gradient, as fake tensors do that only carry shapes.
// Loading this library registers the guard and the hooks for the rest of the process; it has no functions.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <new>

namespace {

const c10::Device device(c10::DeviceType::CUDA, 0);
const c10::Stream stream(c10::Stream::DEFAULT, device);

struct NoGuard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return device; }
  c10::Device getDevice() const override { return device; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream; }
  c10::Stream getNewStream(c10::Device, int) const override { return stream; }
  c10::Stream exchangeStream(c10::Stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};

NoGuard guard;
c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);

// Pinned memory is memory of which we remember that it was asked for as such.
std::mutex mutex;
std::map<const char*, size_t> pinned;  // start and bytes

struct PinnedAllocator final : public c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    const size_t whole = (size / 64 + 1) * 64;
    char* data = static_cast<char*>(std::aligned_alloc(64, whole));
    TORCH_CHECK(data != nullptr, "no memory left for ", size, " bytes");
    std::lock_guard<std::mutex> lock(mutex);
    pinned[data] = whole;
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  static void release(void* data) {
    std::lock_guard<std::mutex> lock(mutex);
    pinned.erase(static_cast<char*>(data));
    std::free(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};

PinnedAllocator pinned_allocator;

struct Hooks final : public at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  long versionRuntimeCuDNN() const override { return 90000; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  bool hasCuDNN() const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  long versionCuDNN() const override { return 90000; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override {
    const char* place = static_cast<const char*>(data);
    std::lock_guard<std::mutex> lock(mutex);
    const auto after = pinned.upper_bound(place);
    return after != pinned.begin() && place < std::prev(after)->first + std::prev(after)->second;
  }
};

// torch chose its hooks when it was imported. Hooks have no fields, so that ours can be made in the place of the chosen ones.
static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
const auto* hooks = new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks({});

}  // namespace
