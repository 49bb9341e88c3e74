// vLLM's hashes of a prompt's blocks, of those without extra keys, by SHA-256.
//
// A block's message is (parent, tokens, None) in pickle's protocol 5 or in CBOR, as hashing.py says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "sha256.hpp"

namespace pdconn {

enum class Encoding { PICKLE, CBOR };

constexpr std::size_t TOKEN_NBYTES = 4;

// A pickle of more than 64 KiB has several frames: blocks are shorter.
constexpr std::size_t MOST_BLOCK_TOKENS = 8192;

class BlockMessage {
public:
    BlockMessage(Encoding encoding, std::size_t block_tokens)
        : encoding_(encoding), block_tokens_(block_tokens), bytes_(MOST_AROUND + 5 * block_tokens) {}

    const std::uint8_t *data() const { return bytes_.data(); }
    std::size_t size() const { return static_cast<std::size_t>(at_ - bytes_.data()); }

    void write(const std::uint8_t *parent, const std::uint8_t *tokens) {
        at_ = bytes_.data();
        if (encoding_ == Encoding::PICKLE)
            write_pickle(parent, tokens);
        else
            write_cbor(parent, tokens);
    }

private:
    static constexpr std::size_t MOST_AROUND = 64;

    void put(std::uint32_t byte) { *at_++ = static_cast<std::uint8_t>(byte); }

    static std::uint32_t token_at(const std::uint8_t *tokens, std::size_t i) {
        std::uint32_t token;
        std::memcpy(&token, tokens + i * TOKEN_NBYTES, sizeof token);  // it need not be aligned
        return token;
    }

    void put_parent(const std::uint8_t *parent) {
        std::memcpy(at_, parent, DIGEST_NBYTES);
        at_ += DIGEST_NBYTES;
    }

    // PROTO 5, FRAME; the parent as SHORT_BINBYTES; the tuple of tokens; None; TUPLE3; each memoized.
    void write_pickle(const std::uint8_t *parent, const std::uint8_t *tokens) {
        put(0x80), put(5), put(0x95);
        std::uint8_t *const length = at_;
        at_ += 8;
        put('C'), put(DIGEST_NBYTES);
        put_parent(parent);
        put(0x94);
        if (block_tokens_ > 3) put('(');
        for (std::size_t i = 0; i < block_tokens_; i++) {
            const std::uint32_t token = token_at(tokens, i);
            if (token < 1u << 8) {
                put('K'), put(token);
            } else if (token < 1u << 16) {
                put('M'), put(token), put(token >> 8);
            } else {
                put('J'), put(token), put(token >> 8), put(token >> 16), put(token >> 24);
            }
        }
        put(block_tokens_ > 3 ? 't' : 0x84 + static_cast<std::uint32_t>(block_tokens_));
        put(0x94), put('N'), put(0x87), put(0x94), put('.');
        const auto framed = static_cast<std::uint64_t>(at_ - length) - 8;
        for (int i = 0; i < 8; i++) length[i] = static_cast<std::uint8_t>(framed >> 8 * i);
    }

    // An integer with CBOR's major type in the three highest bits.
    void put_cbor(std::uint32_t major, std::uint32_t value) {
        if (value < 24) {
            put(major | value);
        } else if (value < 1u << 8) {
            put(major | 24), put(value);
        } else if (value < 1u << 16) {
            put(major | 25), put(value >> 8), put(value);
        } else {
            put(major | 26), put(value >> 24), put(value >> 16), put(value >> 8), put(value);
        }
    }

    void write_cbor(const std::uint8_t *parent, const std::uint8_t *tokens) {
        put_cbor(0x80, 3);
        put_cbor(0x40, DIGEST_NBYTES);
        put_parent(parent);
        put_cbor(0x80, static_cast<std::uint32_t>(block_tokens_));
        for (std::size_t i = 0; i < block_tokens_; i++)
            put_cbor(0, token_at(tokens, i));
        put(0xf6);
    }

    Encoding encoding_;
    std::size_t block_tokens_;
    std::vector<std::uint8_t> bytes_;
    std::uint8_t *at_ = nullptr;
};

// The digests of `blocks` blocks, one after the other; `parent` is that of the block before them.
inline void hash_blocks(Encoding encoding, const std::uint8_t *parent, const std::uint8_t *tokens,
                        std::size_t block_tokens, std::size_t blocks, std::uint8_t *digests,
                        bool by_processor) {
    BlockMessage message(encoding, block_tokens);
    for (; blocks; blocks--, tokens += block_tokens * TOKEN_NBYTES) {
        message.write(parent, tokens);
        digest_of(message.data(), message.size(), digests, by_processor);
        parent = digests;
        digests += DIGEST_NBYTES;
    }
}

}  // namespace pdconn
