// The Python module `_blocks`: decode(), token_ids(), hash_blocks(), and the type HeldBlocks.  See
// _blocks.pyi.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstddef>
#include <cstring>
#include <exception>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "block_chain.hpp"
#include "events.hpp"
#include "held_blocks.hpp"
#include "token_ids.hpp"

namespace {

using pdconn::Hash;

// --- references, arguments, errors ------------------------------------------------------------

// An owned reference; null where Python has set an error.
class Ref {
public:
    explicit Ref(PyObject *object) : object_(object) {}
    Ref(Ref &&other) noexcept : object_(other.release()) {}
    Ref(const Ref &) = delete;
    Ref &operator=(const Ref &) = delete;
    ~Ref() { Py_XDECREF(object_); }
    PyObject *get() const { return object_; }
    PyObject *release() {
        PyObject *object = object_;
        object_ = nullptr;
        return object;
    }

private:
    PyObject *object_;
};

struct PythonError {};  // thrown where Python has set an error

template <typename Work>
PyObject *guarded(Work work) {
    try {
        return work();
    } catch (const PythonError &) {
        return nullptr;
    } catch (const std::bad_alloc &) {
        return PyErr_NoMemory();
    } catch (const std::exception &error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    }
}

[[noreturn]] void fail(PyObject *kind, const char *message) {
    PyErr_SetString(kind, message);
    throw PythonError{};
}

Ref checked(PyObject *object) {
    if (!object) throw PythonError{};
    return Ref(object);
}

void expect_arguments(Py_ssize_t got, Py_ssize_t expected) {
    if (got == expected) return;
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, got);
    throw PythonError{};
}

bool is_true(PyObject *argument) {
    const int found = PyObject_IsTrue(argument);
    if (found < 0) throw PythonError{};
    return found != 0;
}

std::size_t size_of(PyObject *argument) {
    const std::size_t size = PyLong_AsSize_t(argument);
    if (size == static_cast<std::size_t>(-1) && PyErr_Occurred()) throw PythonError{};
    return size;
}

class Buffer {
public:
    Buffer(PyObject *object, int flags) {
        if (PyObject_GetBuffer(object, &view_, flags) < 0) throw PythonError{};
    }
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;
    ~Buffer() { PyBuffer_Release(&view_); }
    const Py_buffer *operator->() const { return &view_; }

private:
    Py_buffer view_;
};

// Hashes from an array of unsigned integers of 64 bits, which is not copied, or from any sequence.
class Hashes {
public:
    explicit Hashes(PyObject *object) {
        if (PyObject_CheckBuffer(object)) {
            buffer_.emplace(object, PyBUF_CONTIG_RO | PyBUF_FORMAT);
            const std::string_view format = (*buffer_)->format ? (*buffer_)->format : "B";
            if ((format != "Q" && format != "L") || (*buffer_)->itemsize != 8)
                fail(PyExc_TypeError, "hashes: expected unsigned integers of 64 bits");
            data_ = static_cast<const Hash *>((*buffer_)->buf);
            number_ = static_cast<std::size_t>((*buffer_)->len) / 8;
            return;
        }
        const Ref items = checked(PySequence_Fast(object, "hashes: expected a sequence"));
        number_ = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(items.get()));
        copied_.resize(number_);
        for (std::size_t at = 0; at < number_; at++) {
            PyObject *item = PySequence_Fast_GET_ITEM(items.get(), at);
            copied_[at] = PyLong_AsUnsignedLongLong(item);
            if (copied_[at] == static_cast<Hash>(-1) && PyErr_Occurred()) throw PythonError{};
        }
        data_ = copied_.data();
    }
    const Hash *data() const { return data_; }
    std::size_t size() const { return number_; }

private:
    std::optional<Buffer> buffer_;
    std::vector<Hash> copied_;
    const Hash *data_ = nullptr;
    std::size_t number_ = 0;
};

// --- decode -----------------------------------------------------------------------------------

PyObject *array_type;  // array.array

Ref none() { return Ref(Py_NewRef(Py_None)); }

Ref number_or_none(const pdconn::Number &number) {
    return number ? checked(PyLong_FromUnsignedLongLong(*number)) : none();
}

Ref text(std::string_view ascii) {
    return checked(PyUnicode_FromStringAndSize(ascii.data(), static_cast<Py_ssize_t>(ascii.size())));
}

Ref text_or_none(const pdconn::Text &value) { return value ? text(*value) : none(); }

bool is_remote(std::string_view locality) {
    constexpr std::string_view REMOTE = "remote";
    if (locality.size() != REMOTE.size()) return false;
    for (std::size_t i = 0; i < REMOTE.size(); i++)
        if ((locality[i] | 0x20) != REMOTE[i]) return false;
    return true;
}

// As _medium of kv_events.py.
Ref medium_of(const pdconn::SentEvent &event) {
    if (event.locality && is_remote(*event.locality)) return text("remote");
    if (!event.medium) return text("unknown");
    std::string lower(*event.medium);
    for (char &c : lower)
        if (c >= 'A' && c <= 'Z') c = static_cast<char>(c | 0x20);
    return text(lower);
}

// What turns a batch into Python's events.
struct Decoded {
    PyObject *payload, *stored_type, *removed_type, *cleared, *raw_type;
    const pdconn::SentBatch &batch;

    Ref hashes_of(const pdconn::SentEvent &event) const {
        const auto *begin = reinterpret_cast<const char *>(batch.hashes.data() + event.begin);
        const Ref bytes =
            checked(PyBytes_FromStringAndSize(begin, static_cast<Py_ssize_t>(event.number * 8)));
        return checked(PyObject_CallFunction(array_type, "CO", 'Q', bytes.get()));
    }

    // Msgpack within the payload, which it keeps alive.
    Ref raw_of(std::string_view part) const {
        if (part.empty()) return none();
        const Py_ssize_t begin = part.data() - PyBytes_AS_STRING(payload);
        const Ref whole = checked(PyMemoryView_FromObject(payload));
        const Ref cut = checked(
            PySequence_GetSlice(whole.get(), begin, begin + static_cast<Py_ssize_t>(part.size())));
        return checked(PyObject_CallOneArg(raw_type, cut.get()));
    }

    Ref event(const pdconn::SentEvent &event) const {
        if (event.type == pdconn::Type::CLEARED) return Ref(Py_NewRef(cleared));
        const Ref hashes = hashes_of(event), group = number_or_none(event.group);
        const Ref medium = medium_of(event);
        if (event.type == pdconn::Type::REMOVED) {
            PyObject *arguments[] = {hashes.get(), group.get(), medium.get()};
            return checked(PyObject_Vectorcall(removed_type, arguments, 3, nullptr));
        }
        const Ref block_tokens = checked(PyLong_FromUnsignedLongLong(event.block_tokens));
        const Ref kind = text_or_none(event.kind), window = number_or_none(event.window);
        const Ref parent = number_or_none(event.parent), tokens = raw_of(event.token_ids);
        const Ref lora = text_or_none(event.lora), keys = raw_of(event.extra_keys);
        PyObject *arguments[] = {hashes.get(), group.get(),  medium.get(), block_tokens.get(),
                                 kind.get(),   window.get(), parent.get(), tokens.get(),
                                 lora.get(),   keys.get()};
        return checked(PyObject_Vectorcall(stored_type, arguments, 10, nullptr));
    }
};

PyObject *decode(PyObject *, PyObject *const *arguments, Py_ssize_t number) {
    return guarded([=]() -> PyObject * {
        expect_arguments(number, 5);
        PyObject *payload = arguments[0];
        if (!PyBytes_Check(payload)) fail(PyExc_TypeError, "payload: expected bytes");
        const std::string_view bytes(PyBytes_AS_STRING(payload),
                                     static_cast<std::size_t>(PyBytes_GET_SIZE(payload)));
        pdconn::SentBatch batch;
        if (!pdconn::EventDecoder(bytes, batch).decode()) return none().release();
        const Decoded decoded{payload,      arguments[1], arguments[2],
                              arguments[3], arguments[4], batch};
        const Ref events = checked(PyList_New(0));  // whole at all times: events are made by Python
        for (const pdconn::SentEvent &sent : batch.events)
            if (PyList_Append(events.get(), decoded.event(sent).get()) < 0) throw PythonError{};
        const Ref ts = checked(PyFloat_FromDouble(batch.ts)), rank = number_or_none(batch.rank);
        return checked(PyTuple_Pack(3, ts.get(), events.get(), rank.get())).release();
    });
}

// --- token_ids --------------------------------------------------------------------------------

PyObject *token_ids(PyObject *, PyObject *json) {
    return guarded([=]() -> PyObject * {
        const Buffer bytes(json, PyBUF_SIMPLE);
        pdconn::TokenIds found({static_cast<const char *>(bytes->buf),
                                static_cast<std::size_t>(bytes->len)});
        if (!found.read()) return none().release();
        const auto *begin = reinterpret_cast<const char *>(found.ids.data());
        const Ref joined =
            checked(PyBytes_FromStringAndSize(begin, static_cast<Py_ssize_t>(found.ids.size() * 4)));
        return checked(PyObject_CallFunction(array_type, "CO", 'i', joined.get())).release();
    });
}

// --- hash_blocks ------------------------------------------------------------------------------

constexpr long INTERFACE = 2;  // counted up with each change of what Python calls: extension.py

bool has_sha;  // of this processor

PyObject *hash_blocks(PyObject *, PyObject *const *arguments, Py_ssize_t number) {
    return guarded([=]() -> PyObject * {
        expect_arguments(number, 5);
        const bool is_cbor = is_true(arguments[0]), is_portable = is_true(arguments[4]);
        const Buffer parent(arguments[1], PyBUF_SIMPLE);
        const Buffer tokens(arguments[2], PyBUF_CONTIG_RO | PyBUF_FORMAT);
        const std::size_t block_tokens = size_of(arguments[3]);
        if (static_cast<std::size_t>(parent->len) != pdconn::DIGEST_NBYTES)
            fail(PyExc_ValueError, "parent: expected 32 bytes");
        const std::string_view format = tokens->format ? tokens->format : "B";
        if (format != "i" || tokens->itemsize != 4)
            fail(PyExc_TypeError, "tokens: expected integers of 32 bits");
        if (block_tokens == 0 || block_tokens > pdconn::MOST_BLOCK_TOKENS)
            fail(PyExc_ValueError, "block_tokens: expected 1 to 8192");
        const std::size_t blocks = static_cast<std::size_t>(tokens->len) / pdconn::TOKEN_NBYTES / block_tokens;
        Ref digests = checked(PyBytes_FromStringAndSize(
            nullptr, static_cast<Py_ssize_t>(blocks * pdconn::DIGEST_NBYTES)));
        pdconn::hash_blocks(is_cbor ? pdconn::Encoding::CBOR : pdconn::Encoding::PICKLE,
                            static_cast<const std::uint8_t *>(parent->buf),
                            static_cast<const std::uint8_t *>(tokens->buf), block_tokens, blocks,
                            reinterpret_cast<std::uint8_t *>(PyBytes_AS_STRING(digests.get())),
                            has_sha && !is_portable);
        return digests.release();
    });
}

// --- HeldBlocks -------------------------------------------------------------------------------

struct Held {
    PyObject_HEAD
    pdconn::HeldBlocks *blocks;
};

pdconn::HeldBlocks &blocks_of(PyObject *self) { return *reinterpret_cast<Held *>(self)->blocks; }

std::size_t place_of(const pdconn::HeldBlocks &blocks, PyObject *argument) {
    const std::size_t place = size_of(argument);
    if (place >= blocks.num_words() * pdconn::POD_BITS) fail(PyExc_IndexError, "place");
    return place;
}

std::size_t plane_of(const pdconn::HeldBlocks &blocks, PyObject *argument) {
    const std::size_t plane = size_of(argument);
    if (!blocks.has_plane(plane)) fail(PyExc_IndexError, "plane");
    return plane;
}

PyObject *pair_of(const pdconn::Counted &counted) {
    return Py_BuildValue("(nn)", static_cast<Py_ssize_t>(counted.done),
                         static_cast<Py_ssize_t>(counted.ignored));
}

PyObject *held_new(PyTypeObject *type, PyObject *, PyObject *) {
    return guarded([=]() -> PyObject * {
        Ref self = checked(type->tp_alloc(type, 0));
        reinterpret_cast<Held *>(self.get())->blocks = new pdconn::HeldBlocks;
        return self.release();
    });
}

void held_free(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    delete reinterpret_cast<Held *>(self)->blocks;
    type->tp_free(self);
    Py_DECREF(type);
}

PyObject *num_hashes(PyObject *self, void *) {
    return PyLong_FromSize_t(blocks_of(self).num_hashes());
}

PyObject *num_words(PyObject *self, void *) {
    return PyLong_FromSize_t(blocks_of(self).num_words());
}

PyObject *add_word(PyObject *self, PyObject *) {
    return guarded([=] {
        blocks_of(self).add_word();
        return none().release();
    });
}

PyObject *add_plane(PyObject *self, PyObject *) {
    return guarded([=] { return PyLong_FromSize_t(blocks_of(self).add_plane()); });
}

PyObject *drop_plane(PyObject *self, PyObject *argument) {
    return guarded([=] {
        pdconn::HeldBlocks &blocks = blocks_of(self);
        blocks.drop_plane(plane_of(blocks, argument));
        return none().release();
    });
}

PyObject *store(PyObject *self, PyObject *const *arguments, Py_ssize_t number) {
    return guarded([=] {
        expect_arguments(number, 5);
        const Hashes hashes(arguments[2]);
        const std::size_t room = size_of(arguments[3]);
        const bool counts_copies = is_true(arguments[4]);
        // Last, since what ran before may be Python that changes the planes.
        pdconn::HeldBlocks &blocks = blocks_of(self);
        const std::size_t place = place_of(blocks, arguments[0]);
        const std::size_t plane = plane_of(blocks, arguments[1]);
        return pair_of(
            blocks.store(place, plane, hashes.data(), hashes.size(), room, counts_copies));
    });
}

PyObject *remove(PyObject *self, PyObject *const *arguments, Py_ssize_t number) {
    return guarded([=] {
        expect_arguments(number, 3);
        const Hashes hashes(arguments[2]);
        pdconn::HeldBlocks &blocks = blocks_of(self);
        const std::size_t place = place_of(blocks, arguments[0]);
        const std::size_t plane = plane_of(blocks, arguments[1]);
        return pair_of(blocks.remove(place, plane, hashes.data(), hashes.size()));
    });
}

PyObject *clear(PyObject *self, PyObject *argument) {
    return guarded([=] {
        pdconn::HeldBlocks &blocks = blocks_of(self);
        const std::vector<std::size_t> removed = blocks.clear(place_of(blocks, argument));
        Ref found = checked(PyDict_New());
        for (std::size_t plane = 0; plane < removed.size(); plane++) {
            if (!removed[plane]) continue;
            const Ref key = checked(PyLong_FromSize_t(plane));
            const Ref value = checked(PyLong_FromSize_t(removed[plane]));
            if (PyDict_SetItem(found.get(), key.get(), value.get()) < 0) throw PythonError{};
        }
        return found.release();
    });
}

PyObject *num_copies(PyObject *self, PyObject *argument) {
    return guarded([=] {
        const pdconn::HeldBlocks &blocks = blocks_of(self);
        return PyLong_FromSize_t(blocks.num_copies(place_of(blocks, argument)));
    });
}

PyObject *found_slots(PyObject *self, PyObject *argument, bool leading) {
    return guarded([=]() -> PyObject * {
        const Hashes hashes(argument);
        const auto nbytes = static_cast<Py_ssize_t>(hashes.size() * sizeof(Py_ssize_t));
        PyObject *slots = checked(PyBytes_FromStringAndSize(nullptr, nbytes)).release();
        auto *out = reinterpret_cast<Py_ssize_t *>(PyBytes_AS_STRING(slots));
        const std::size_t found = blocks_of(self).find(hashes.data(), hashes.size(), leading, out);
        if (found < hashes.size())
            _PyBytes_Resize(&slots, static_cast<Py_ssize_t>(found * sizeof(Py_ssize_t)));
        return slots;
    });
}

PyObject *slots_of(PyObject *self, PyObject *hashes) { return found_slots(self, hashes, false); }

PyObject *leading_slots_of(PyObject *self, PyObject *hashes) {
    return found_slots(self, hashes, true);
}

PyObject *held(PyObject *self, PyObject *const *arguments, Py_ssize_t number) {
    return guarded([=] {
        expect_arguments(number, 3);
        const Buffer slots(arguments[2], PyBUF_STRIDED_RO);
        const pdconn::HeldBlocks &blocks = blocks_of(self);
        const std::size_t plane = plane_of(blocks, arguments[0]);
        const std::size_t word = size_of(arguments[1]);
        if (word >= blocks.num_words()) fail(PyExc_IndexError, "word");
        if (slots->ndim != 1 || slots->itemsize != sizeof(Py_ssize_t))
            fail(PyExc_TypeError, "slots: expected one row of intp");
        Ref words = checked(PyBytes_FromStringAndSize(
            nullptr, slots->shape[0] * static_cast<Py_ssize_t>(sizeof(pdconn::Word))));
        auto *out = reinterpret_cast<pdconn::Word *>(PyBytes_AS_STRING(words.get()));
        const char *at = static_cast<const char *>(slots->buf);
        for (Py_ssize_t row = 0; row < slots->shape[0]; row++, at += slots->strides[0]) {
            std::size_t slot;
            std::memcpy(&slot, at, sizeof slot);  // it need not be aligned
            out[row] = blocks.held(plane, word, slot);
        }
        return words.release();
    });
}

template <typename Function>
PyCFunction as_method(Function function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef HELD_METHODS[] = {
    {"add_word", add_word, METH_NOARGS, "Room for another 64 pods."},
    {"add_plane", add_plane, METH_NOARGS, "The number of a new plane."},
    {"drop_plane", drop_plane, METH_O, "Forget a plane in which no pod holds a block."},
    {"store", as_method(store), METH_FASTCALL, "Add blocks to a pod."},
    {"remove", as_method(remove), METH_FASTCALL, "Remove blocks from a pod, one copy of each."},
    {"clear", clear, METH_O, "Remove all blocks of a pod."},
    {"num_copies", num_copies, METH_O, "Copies of a pod's blocks beside the first of each."},
    {"slots_of", slots_of, METH_O, "The slot of each hash."},
    {"leading_slots_of", leading_slots_of, METH_O, "The slots before the first unknown hash."},
    {"held", as_method(held), METH_FASTCALL, "For each slot, the pods of one word that hold it."},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef HELD_PROPERTIES[] = {
    {"num_hashes", num_hashes, nullptr, "Hashes that some pod holds.", nullptr},
    {"num_words", num_words, nullptr, "Words that hold one bit for each pod.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot HELD_SLOTS[] = {
    {Py_tp_new, reinterpret_cast<void *>(held_new)},
    {Py_tp_dealloc, reinterpret_cast<void *>(held_free)},
    {Py_tp_methods, HELD_METHODS},
    {Py_tp_getset, HELD_PROPERTIES},
    {0, nullptr},
};

PyType_Spec HELD_SPEC = {
    "pdconn.router.prefix.compiled._blocks.HeldBlocks", sizeof(Held), 0, Py_TPFLAGS_DEFAULT,
    HELD_SLOTS,
};

PyMethodDef FUNCTIONS[] = {
    {"decode", as_method(decode), METH_FASTCALL, "Decode a batch of KV events, or return None."},
    {"token_ids", token_ids, METH_O, "The integers of a JSON array, or None."},
    {"hash_blocks", as_method(hash_blocks), METH_FASTCALL, "The hashes of a prompt's blocks."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_blocks", "Blocks of the prefix index, compiled.", -1, FUNCTIONS,
    nullptr, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__blocks() {
    return guarded([]() -> PyObject * {
        const Ref arrays = checked(PyImport_ImportModule("array"));
        Ref module = checked(PyModule_Create(&MODULE));
        const Ref type = checked(PyType_FromSpec(&HELD_SPEC));
        if (PyModule_AddObjectRef(module.get(), "HeldBlocks", type.get()) < 0) throw PythonError{};
        has_sha = pdconn::sha256::has_instructions();
        if (PyModule_AddIntConstant(module.get(), "INTERFACE", INTERFACE) < 0 ||
            PyModule_AddIntConstant(module.get(), "HAS_SHA", has_sha) < 0)
            throw PythonError{};
        array_type = checked(PyObject_GetAttrString(arrays.get(), "array")).release();
        return module.release();
    });
}
