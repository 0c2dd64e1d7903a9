//! The outcome that `run` commits: version, exit status, stdout.

/// The first byte: no text that a person commits by hand begins with it.
const VERSION: u8 = 1;
/// Bytes before the stdout: the version and the status.
pub(crate) const FRAME_BYTES: usize = 5;

/// What a command left behind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ran {
    pub(crate) status: i32,
    pub(crate) stdout: Vec<u8>,
}

impl Ran {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(FRAME_BYTES + self.stdout.len());
        bytes.push(VERSION);
        bytes.extend_from_slice(&self.status.to_le_bytes());
        bytes.extend_from_slice(&self.stdout);
        bytes
    }

    /// Reads an outcome back. One that `commit` or `resolve` wrote is the stdout of a success.
    pub(crate) fn decode(bytes: &[u8]) -> Ran {
        if let Some((&VERSION, rest)) = bytes.split_first()
            && let Some((status, stdout)) = rest.split_first_chunk()
        {
            return Ran {
                status: i32::from_le_bytes(*status),
                stdout: stdout.to_vec(),
            };
        }
        Ran {
            status: 0,
            stdout: bytes.to_vec(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outcome_reads_back_as_it_was() {
        for stdout in [&b""[..], b"paid\n", b"\x01\x00\xff"] {
            let ran = Ran {
                status: 75,
                stdout: stdout.to_vec(),
            };
            assert_eq!(Ran::decode(&ran.encode()), ran);
        }
        assert_eq!(
            Ran {
                status: 258,
                stdout: b"x".to_vec()
            }
            .encode(),
            b"\x01\x02\x01\0\0x"
        );
    }

    #[test]
    fn an_outcome_written_by_hand_is_the_stdout_of_a_success() {
        for bytes in [&b""[..], b"paid by hand", b"\x01\x00"] {
            assert_eq!(
                Ran::decode(bytes),
                Ran {
                    status: 0,
                    stdout: bytes.to_vec()
                }
            );
        }
    }
}
